"""The cause of a failure, computed from how each rank ended, and the message about it. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from horo.config.hosts import ranges
from horo.runner.agent.rank_reports import Note
from horo.runner.config import EXIT_UNREACHABLE
from horo.runner.text import printable

__all__ = [
    "Ending",
    "awaited",
    "exit_code",
    "how_it_ended",
    "how_it_failed",
    "overdue",
    "report",
    "root_cause",
    "signal_name",
]

_LAST_LINES = 20
_LAST_LINES_HIDDEN = 60
"""Of a rank whose lines were not shown: a traceback, also one of a worker of a DataLoader inside it."""
_POINTS_AT = re.compile(rb"(?:PeerLost|Aborted|Stalled)Error: [^\n]{0,1000}?\brank (\d{1,9})\b")
"""Bounded: a rank may write anything, digits without end too."""


@dataclass(frozen=True)
class Ending:
    """The end of a rank.

    Attributes:
        rank: its number.
        host: its host, as given to ``-H``.
        code: its exit code; 0 with ``signal`` or ``lost``.
        signal: the signal that killed it; 0: none did.
        asked: hororun had asked it to end before.
        lost: the reason why its host cannot report its end; empty: it could.
        stderr_tail: the end of its stderr.
        note: its own words about its end.
        overdue: it did not end in the grace time and was killed.
        passed_on: hororun has passed on the signal that killed it.
    """

    rank: int
    host: str
    code: int = 0
    signal: int = 0
    asked: bool = False
    lost: str = ""
    stderr_tail: bytes = b""
    note: Note = field(default_factory=Note)
    overdue: bool = False
    passed_on: bool = False

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than with code 0."""
        return bool(self.code or self.signal or self.lost)

    @property
    def is_own(self) -> bool:
        """Whether it failed by itself, although hororun had asked it to end."""
        return bool(self.lost or self.note.error)

    @property
    def points_at(self) -> int | None:
        """The rank that caused its end, from its report or the end of its stderr; None: unknown."""
        if self.note.points_at is not None or self.note.error:
            return self.note.points_at
        named = _POINTS_AT.findall(self.stderr_tail)
        return int(named[-1]) if named else None


def root_cause(endings: Sequence[Ending]) -> Ending | None:
    """The failure that caused the others; None: no rank failed by itself.

    It is the first in time (``endings`` are in the order they became known). But a rank that ended because its group
    did points at another. If that one failed too, and not because hororun asked it to end, it is the cause, although
    its end became known later.
    """
    failures = {ending.rank: ending for ending in endings if ending.failed and (not ending.asked or ending.is_own)}
    first = next((ending for ending in endings if ending.failed and not ending.asked), None)
    if first is None:
        return next(iter(failures.values()), None)
    path = _follow(first.rank, {rank: ending.points_at for rank, ending in failures.items()})
    return failures[path[-1]] if path[-1] in failures else failures[path[-2]]


def awaited(endings: Sequence[Ending], notes: Mapping[int, Note]) -> int | None:
    """The rank that the first failure points at, directly or through others, as long as nothing is known of its end.

    Args:
        endings: of the ranks that have ended, in the order they became known.
        notes: of all ranks.
    """
    first = next((ending for ending in endings if ending.failed and not ending.asked), None)
    if first is None:
        return None
    ended = {ending.rank: ending.points_at for ending in endings}
    told = {rank: note.points_at for rank, note in notes.items() if note.error and rank not in ended}
    last = _follow(first.rank, ended | told)[-1]
    return None if last in ended or last in told else last


def _follow(rank: int, points_at: Mapping[int, int | None]) -> list[int]:
    """The ranks from ``rank`` to the one that points at nobody, that nothing is known of, or that closes a circle."""
    path = [rank]
    while (named := points_at.get(path[-1])) is not None and named not in path:
        path.append(named)
    return path


def exit_code(cause: Ending) -> int:
    """hororun's exit code for this cause: the rank's code, 128 + its signal, or 69 when its host was lost.

    For a rank that was ended on its way to the end that an exception has brought, since it took too long or by a signal
    that hororun passed on: the code of a ``SystemExit``, else 1. Python traps no signals any more by then.
    """
    if cause.lost:
        return EXIT_UNREACHABLE
    if (cause.asked or cause.passed_on) and cause.note.error:
        return cause.note.status or 1
    return 128 + cause.signal if cause.signal else cause.code


def report(cause: Ending, endings: Iterable[Ending], word: str = "rank", *, shown: bool = True) -> bytes:
    """The cause and one line on how the others ended.

    The cause is the exception and its line in the script, if the rank has said it: its traceback stands above, if
    ``shown``. Else the last lines on its stderr follow. ``word``: what their numbers are called.
    """
    note = cause.note
    endings = list(endings)
    left = [each.rank for each in endings if each.rank == note.points_at and not each.failed]
    kind, _, words = note.error.partition(": ")
    how = how_it_failed(cause)
    if left and words.startswith("rank ") and not cause.lost:  # that one has ended well, but too early
        how = how.replace(note.error, kind, 1)
    else:
        words = ""
    reason = f"{words}; so " if left and words else ""
    text = printable(f"hororun: {reason}{word} {cause.rank} on {cause.host} {how}; the job was ended").encode() + b"\n"
    if not note.error or not shown:
        text += _last_lines(cause, _LAST_LINES if shown else _LAST_LINES_HIDDEN)
    groups: dict[str, list[int]] = {}
    for ending in sorted(endings, key=lambda each: each.rank):
        if ending.rank != cause.rank:
            groups.setdefault(how_it_ended(ending), []).append(ending.rank)
    others = [f"{word}{'s' if len(ranks) > 1 else ''} {ranges(ranks)} {how}" for how, ranks in groups.items()]
    return text + (printable(f"hororun: the others: {'; '.join(others)}").encode() + b"\n" if others else b"")


def overdue(endings: Iterable[Ending], grace_s: float, word: str = "rank") -> str:
    """A sentence about the ranks that were killed because the grace time was over; empty: none was. ``word``: as for
    ``report``."""
    ranks = sorted(ending.rank for ending in endings if ending.overdue)
    if not ranks:
        return ""
    who, were = (f"{word} {ranks[0]}", "was") if len(ranks) == 1 else (f"{word}s {ranges(ranks)}", "were")
    return f"{who} did not end within {grace_s:g} s of SIGTERM and {were} killed; --grace-seconds gives more"


def _last_lines(cause: Ending, most: int) -> bytes:
    lines = cause.stderr_tail.replace(b"\r\n", b"\n").rstrip(b"\n").split(b"\n")[-most:]
    shown = [line.rpartition(b"\r")[2] for line in lines]
    if not any(line.strip() for line in shown):
        return b""
    return b"hororun: its last lines on stderr:\n" + b"".join(b"  | " + line + b"\n" for line in shown)


def signal_name(number: int) -> str:
    """``"SIGSEGV"``; a number the system has no name for becomes ``"signal 60"``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_it_ended(ending: Ending) -> str:
    """``exited with code 7``, ``killed by SIGSEGV``."""
    asked = " when asked to end" if ending.asked else ""
    if ending.lost:
        return f"lost with its host ({ending.lost})"
    if ending.signal:
        return f"killed by {signal_name(ending.signal)}{asked}"
    return f"exited with code {ending.code}{asked}"


def how_it_failed(ending: Ending) -> str:
    """``was killed by SIGSEGV``, or ``ended with`` the exception and its line in the script."""
    note = ending.note
    if ending.lost or not note.error:
        return ("was " if ending.lost or ending.signal else "") + how_it_ended(ending)
    return f"ended with {note.error} ({'; '.join(filter(None, (note.where, how_it_ended(ending))))})"
