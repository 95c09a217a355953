"""Text from elsewhere in lines of hororun's own: it must move no cursor, change no title and begin no line."""

from __future__ import annotations

__all__ = ["printable", "printable_lines"]

_ESCAPED_BYTE = range(0xDC80, 0xDD00)


def printable(text: str) -> str:
    """``text`` with each control character, and each byte that is no character, as ``\\x1b`` or ``\\u202e``."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def printable_lines(text: str) -> str:
    """The same for lines of which hororun itself has made several."""
    return "\n".join(map(printable, text.split("\n")))


def _escaped(character: str) -> str:
    code = ord(character)
    if code in _ESCAPED_BYTE:  # a byte that is no text, as Python takes it over from the system
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")
