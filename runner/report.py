"""The cause of a failure, computed from how each rank ended, and the message about it. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from horo.runner.config import EXIT_UNREACHABLE

__all__ = ["Ending", "exit_code", "ranges", "report", "root_cause", "signal_name"]

_LAST_LINES = 20
_POINTS_AT = re.compile(rb"(?:PeerLost|Aborted|Stalled)Error.*?\brank (\d+)", re.DOTALL)


@dataclass(frozen=True)
class Ending:
    """How a rank ended.

    Attributes:
        rank: its number.
        host: its host, as given to ``-H``.
        code: its exit code; 0 when ``signal`` or ``lost`` says more.
        signal: what killed it; 0: nothing did.
        asked: it had been told to end before.
        lost: why its host cannot say how it ended; empty: it could.
        stderr_tail: the end of its stderr.
    """

    rank: int
    host: str
    code: int = 0
    signal: int = 0
    asked: bool = False
    lost: str = ""
    stderr_tail: bytes = b""

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than with code 0."""
        return bool(self.code or self.signal or self.lost)


def root_cause(endings: Sequence[Ending]) -> Ending | None:
    """The failure that caused the others; None: no rank failed of itself.

    It is the first in time (``endings`` are in the order they became known). But a rank that died of a
    ``PeerLostError``, or because a peer shut horo down or stalled, points at another: if that one failed too, and not
    because hororun told it to, it is the cause, although its end was reported later from another host.
    """
    failures = {ending.rank: ending for ending in endings if ending.failed and (ending.lost or not ending.asked)}
    first = next((ending for ending in endings if ending.failed and not ending.asked), None)
    if first is None:
        return next(iter(failures.values()), None)
    cause = first
    visited = {cause.rank}
    while named := _POINTS_AT.findall(cause.stderr_tail):
        lost_rank = int(named[-1])
        if lost_rank in visited or lost_rank not in failures:
            break
        visited.add(lost_rank)
        cause = failures[lost_rank]
    return cause


def exit_code(cause: Ending) -> int:
    """What hororun exits with for this cause: the rank's code, 128 + its signal, or 69 when its host was lost."""
    if cause.lost:
        return EXIT_UNREACHABLE
    return 128 + cause.signal if cause.signal else cause.code


def report(cause: Ending, endings: Iterable[Ending]) -> bytes:
    """The cause, the last lines it wrote to stderr, and one line on how the others ended."""
    verb = "was " if cause.lost or cause.signal else ""
    text = f"hororun: rank {cause.rank} on {cause.host} {verb}{_how(cause)}; the job was ended\n".encode()
    lines = cause.stderr_tail.replace(b"\r\n", b"\n").rstrip(b"\n").split(b"\n")[-_LAST_LINES:]
    shown = [line.rpartition(b"\r")[2] for line in lines]
    if any(line.strip() for line in shown):
        text += b"hororun: its last lines on stderr:\n" + b"".join(b"  | " + line + b"\n" for line in shown)
    groups: dict[str, list[int]] = {}
    for ending in sorted(endings, key=lambda each: each.rank):
        if ending.rank != cause.rank:
            groups.setdefault(_how(ending), []).append(ending.rank)
    others = [f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)} {how}" for how, ranks in groups.items()]
    return text + (f"hororun: the others: {'; '.join(others)}\n".encode() if others else b"")


def ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2,5"``; the numbers ascend."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def signal_name(number: int) -> str:
    """``"SIGSEGV"``; a number the system has no name for becomes ``"signal 60"``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _how(ending: Ending) -> str:
    asked = " when told to end" if ending.asked else ""
    if ending.lost:
        return f"lost with its host ({ending.lost})"
    if ending.signal:
        return f"killed by {signal_name(ending.signal)}{asked}"
    return f"exited with code {ending.code}{asked}"
