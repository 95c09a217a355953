"""hororun's stdout and stderr and the files of the ranks, behind one writer."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence

from horo.runner.config import OutputOptions
from horo.runner.job.output import Printer, Writer, colour_wanted, redraw_possible
from horo.runner.job.rank_files import RankFiles, explained, make_folder
from horo.runner.loop import Loop
from horo.runner.text import printable_lines

__all__ = ["Console"]

_FLUSH_TIMEOUT_S = 1.0


class Console:
    """Takes the output of the ranks; while ``full``, the ranks have to wait.

    The handler of a signal sets ``interrupted`` to end a ``flush``.

    Attributes:
        first: the process that is rank 0, whose lines are shown where no others are.
    """

    def __init__(self, loop: Loop, options: OutputOptions, size: int) -> None:
        self.interrupted = False
        self.first = 0
        self._loop = loop
        self._verbose = options.verbose
        self._options = options
        self._files: RankFiles | None = None
        if options.directory is not None:
            make_folder(options.directory)
        self._complained: set[int] = set()
        self._writer = Writer(loop.wake)
        self._printer = Printer(
            self._writer.put,
            size,
            prefix=options.prefix,
            timestamp=options.timestamp,
            streams=options.streams,
            terminals=frozenset(fd for fd in (1, 2) if redraw_possible(fd)),
            coloured=frozenset(fd for fd in (1, 2) if colour_wanted(fd)),
        )

    def place(self, hosts: Sequence[str]) -> None:
        """Opens the files of the ranks, of which it takes the output from now on; ``hosts``: of each rank.

        Called again with more of them, opens those of the new ones.

        Raises:
            JobError: a file cannot be made.
        """
        self._printer.place(hosts, named=self._options.host)
        if self._options.directory is not None:
            with explained(self._options.directory):
                if self._files is not None:
                    self._files.add(hosts)
                    return
                self._files = RankFiles(self._options.directory, hosts, named=self._options.host)

    @property
    def full(self) -> bool:
        """Whether ranks should wait before they write more."""
        return self._writer.full

    @property
    def stdout_error(self) -> OSError | None:
        """The error after which stdout takes no more; None: there was none."""
        return self._writer.failure(1)

    def output(self, rank: int, stream: int, data: bytes) -> None:
        """A rank wrote ``data`` to stream 1 or 2."""
        if self.shows(rank):
            self._printer.feed(rank, stream, data, time.monotonic())
        if self._files is not None:
            fd = self._files.fd(rank, stream)
            self._writer.put(fd, data)
            self._complain_once(fd)

    def shows(self, rank: int) -> bool:
        """Whether the lines of a rank are shown; else they are in its files only."""
        return rank == self.first or not self._options.first_only

    def rank_ended(self, rank: int) -> None:
        """Shows the unfinished lines of the rank."""
        self._printer.finish(rank, time.monotonic())

    def say(self, text: str) -> None:
        """A line of hororun's own."""
        self._printer.say(f"hororun: {printable_lines(text)}\n".encode())

    def say_lines(self, lines: bytes) -> None:
        """Whole lines of hororun's own."""
        self._printer.say(lines)

    def explain(self, text: str) -> None:
        """A line that only ``--verbose`` shows."""
        if self._verbose:
            self.say(text)

    @property
    def columns(self) -> int:
        """Columns of the terminal that stderr is; 0: lines cannot be redrawn there."""
        try:
            return os.get_terminal_size(2).columns if redraw_possible(2) else 0
        except OSError:
            return 0

    def show_live(self, text: str) -> None:
        """Shows a line below all others, in the place of the one before; empty: none. Not while nothing is read."""
        if not text or not self.full:
            self._printer.show_live(printable_lines(text).encode())

    def flush(self, *, wait_for_all: bool) -> None:
        """Waits until all is written. Without ``wait_for_all``, waits only briefly, since stdout may be blocked."""
        self._printer.close()
        self.interrupted = False  # a signal that ended the job must not suppress the message about it
        out_of_time: list[bool] = []
        if not wait_for_all:
            self._loop.call_later(_FLUSH_TIMEOUT_S, lambda: out_of_time.append(True))
        self._loop.run_until(lambda: self._writer.idle or bool(out_of_time) or self.interrupted)

    def _complain_once(self, fd: int) -> None:
        error = self._writer.failure(fd)
        if error is not None and self._files is not None and fd not in self._complained:
            self._complained.add(fd)
            reason = error.strerror or errno.errorcode.get(error.errno or 0, "unknown error")
            self.say(f"the file of {self._files.name_of(fd)} is incomplete from here on: {reason}")
