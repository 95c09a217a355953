"""Numbers in words for the user: times, sizes, shares."""

from __future__ import annotations

__all__ = ["count", "duration", "ms", "percent", "size", "span"]


def count(number: int, one: str, many: str = "") -> str:
    """With its unit: ``1,234 steps``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def percent(share: float) -> str:
    """Of a share of 1."""
    return f"{100 * share:.0f} %"


def ms(seconds: float) -> str:
    """A time in milliseconds, without the unit."""
    return f"{1e3 * seconds:,.1f}"


def size(number: float) -> str:
    """A number of bytes."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.0f} bytes" if unit == "bytes" else f"{number:,.1f} {unit}"


def span(least: float, most: float) -> str:
    """From a number of bytes to another one, as one where they look alike."""
    low, high = size(least), size(most)
    if low == high:
        return high
    return f"{low.split()[0] if low.split()[1] == high.split()[1] else low} to {high}"


def duration(seconds: float) -> str:
    """A time, as a person would say it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02}m {rest:02}s" if hours else f"{minutes}m {rest:02}s"
