"""The sights of a job while it runs: the line of ``--live``, the same for ``--attach``, and ``--metrics-port``."""

from __future__ import annotations

import locale
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from horo.runner.agent.ranks import Event, Exited, Noted, Wrote
from horo.runner.job.attach_server import AttachServer
from horo.runner.job.live import Progress, line

if TYPE_CHECKING:
    from horo.runner.agent.rank_reports import NoteReader
    from horo.runner.config import Job
    from horo.runner.job.console import Console
    from horo.runner.job.metrics import MetricsServer
    from horo.runner.loop import Loop, Timer

__all__ = ["RanksSeen", "Watched", "Watching"]

_EVERY_S = 1.0
_PLAIN_EVERY_S = 30.0
_ATTACHED_WIDTH = 400


class Watched(Protocol):
    """A host with ranks."""

    def watch(self, every_s: float) -> bool:
        """Has their counts reported so often, 0: no more; False: nothing can be asked there yet."""

    def show_stacks(self) -> None:
        """Has each show its stack on its stderr."""


class RanksSeen(NamedTuple):
    """The ranks of a job, as its supervisor sees them.

    Attributes:
        notes: of each.
        names: of their hosts.
        hosts: that have ranks now.
        word: the name for a process.
    """

    notes: Mapping[int, NoteReader]
    names: Mapping[int, str]
    hosts: Callable[[], Sequence[Watched]]
    word: str


class Watching:
    """Has the agents read the counts of their ranks while somebody is to see them, and shows them.

    Args:
        loop: calls back.
        job: that runs.
        console: gets the line.
        seen: the ranks.
    """

    def __init__(self, loop: Loop, job: Job, console: Console, seen: RanksSeen) -> None:
        self._loop, self._console, self._seen = loop, console, seen
        self._progress = Progress(seen.word)
        self._is_live = job.live
        self._metrics: MetricsServer | None = None
        if job.metrics is not None:
            from horo.runner.job.metrics import MetricsServer  # noqa: PLC0415 - Python's HTTP takes longer than all of horo

            self._metrics = MetricsServer(loop, *job.metrics)
        self._attached = AttachServer(loop, self._on_attached, self._show_stacks)
        self._asked: list[Watched] = []
        """Hosts that have been asked for counts."""
        self._timer: Timer | None = None
        self._said_s = loop.now_s
        self._is_over = False
        if self._metrics is not None:
            console.say(f"metrics at {self._metrics.url}")
        self._on_attached()

    def on_event(self, event: Event) -> None:
        """Something has happened to a rank."""
        if isinstance(event, Noted) and self._timer is not None:
            now = self._seen.notes[event.rank].note.now
            if now is not None:
                self._progress.update(event.rank, now, self._loop.now_s)
        elif isinstance(event, Wrote) and event.stream == 2:
            self._attached.copy(event.rank, event.data)
        elif isinstance(event, Exited):
            self._progress.ended(event.rank)

    def close(self) -> None:
        """The job is over: takes the line away."""
        self._is_over = True
        self._stop()
        self._attached.close()
        if self._metrics is not None:
            self._metrics.close()

    def _on_attached(self) -> None:
        """Somebody has come to look, or has left."""
        is_wanted = self._is_live or self._metrics is not None or self._attached.is_watched
        if is_wanted and self._timer is None and not self._is_over:
            self._timer = self._loop.call_later(_EVERY_S, self._tick)
        elif not is_wanted:
            self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for host in self._asked:
            host.watch(0)
        self._asked.clear()
        if self._is_live:
            self._console.show_live("")

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_EVERY_S, self._tick)
        for host in self._seen.hosts():
            if host not in self._asked and host.watch(_EVERY_S):
                self._asked.append(host)
        now_s = self._loop.now_s
        if self._is_live:
            self._show(now_s)
        if self._attached.is_watched:
            self._attached.show(line(self._progress, now_s, _ATTACHED_WIDTH))
        if self._metrics is not None:
            self._metrics.show(self._progress.counts, self._seen.names, self._seen.word)
        self._on_attached()

    def _show(self, now_s: float) -> None:
        columns = self._console.columns
        if columns:
            begin = "hororun: "
            text = line(self._progress, now_s, columns - len(begin) - 1, plain=not _is_utf8())
            self._console.show_live(begin + text if text else "")
        elif now_s - self._said_s >= _PLAIN_EVERY_S and (
            text := line(self._progress, now_s, _ATTACHED_WIDTH, plain=True)
        ):
            self._said_s = now_s
            self._console.say(text)

    def _show_stacks(self) -> None:
        for host in self._seen.hosts():
            host.show_stacks()


def _is_utf8() -> bool:
    """Whether the terminal shows characters beyond ASCII, as far as the locale tells."""
    return "utf" in locale.getpreferredencoding(False).lower()
