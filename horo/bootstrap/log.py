"""The logger "horo": its level, and lines on stderr, as the core's own: ``horo [rank] level: text``."""

from __future__ import annotations

import logging

__all__ = ["prepare_log"]

_LEVELS = {
    "trace": logging.DEBUG,  # only the core has finer messages
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
    "fatal": logging.CRITICAL + 1,
}


class _LogHandler(logging.StreamHandler):  # type: ignore[type-arg]  # not generic at run time before Python 3.11
    """A handler of horo's own, so that a later start can remove it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._head = f"horo [{rank}] "

    def format(self, record: logging.LogRecord) -> str:
        return f"{self._head}{record.levelname.lower()}: {super().format(record)}"


_given = [logging.NOTSET]
"""The level that the last start has given the logger. Another one is the program's."""


def prepare_log(level: str, rank: int) -> None:
    """Gives the logger "horo" a level, and a handler for stderr, each only where the program has given it none."""
    log = logging.getLogger("horo")
    if log.level in (logging.NOTSET, *_given):
        log.setLevel(_LEVELS[level])
        _given[:] = [log.level]
    for handler in [handler for handler in log.handlers if isinstance(handler, _LogHandler)]:
        log.removeHandler(handler)
    if not log.hasHandlers():
        log.addHandler(_LogHandler(rank))
