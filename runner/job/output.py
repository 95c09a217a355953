"""The output of ranks on the console, as bytes throughout: whole lines with a prefix.

A line on the console is never mixed with another one. A line that ends in a lone carriage return, as a progress bar
writes it, is an *update*: on a terminal it is redrawn in place, elsewhere at most one per second is shown, as a line.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple

__all__ = [
    "LINE_MAX_BYTES",
    "LineSplitter",
    "Piece",
    "Printer",
    "Writer",
    "colour_wanted",
    "redraw_possible",
]

LINE_MAX_BYTES = 64 << 20
"""A line longer than this is cut, so that no rank can fill the launcher's memory."""
_UPDATE_INTERVAL_S = 1.0
_COLOURS = (36, 33, 32, 35, 34, 31)
_ERASE_LINE = b"\x1b[2K"
_ERASED_ROWS = (b"", b"\r" + _ERASE_LINE, b"\r" + _ERASE_LINE + b"\x1b[A" + _ERASE_LINE)
_NO_WRAP, _WRAP = b"\x1b[?7l", b"\x1b[?7h"
_MOVES = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-ln-~]")
"""Sequences of a terminal other than colours: while there is a line at the bottom, others must not leave their row."""
_UP = b"\x1b[A"
"""Ends an inner progress bar, whose outer one is in the row above."""
_HIGH_WATER_BYTES = 8 << 20
_LOW_WATER_BYTES = 1 << 20
_WRITE_BYTES = 1 << 16
_ITEM_BYTES = 128
"""Memory of an entry of the queue besides its bytes."""


class Piece(NamedTuple):
    """A line without its end; ``update``: it ended in a lone carriage return and will be overwritten."""

    text: bytes
    update: bool


class LineSplitter:
    """Cuts one stream into lines, whatever sizes it comes in. Ends are ``\\n``, ``\\r\\n`` and ``\\r``."""

    def __init__(self, line_max_bytes: int = LINE_MAX_BYTES) -> None:
        self._line_max_bytes = line_max_bytes
        self._held = bytearray()
        self._after_return = False

    def feed(self, data: bytes) -> list[Piece]:
        """The lines that ``data`` completes; a line that ends in ``\\r`` waits for the next byte."""
        if not data:
            return []
        pieces: list[Piece] = []
        if self._after_return:
            newline = data.startswith(b"\n")
            data = data[1:] if newline else data
            pieces.append(self._take(update=not newline))
            self._after_return = False
        parts = data.splitlines(keepends=True)
        for index, part in enumerate(parts, start=1):
            if part.endswith(b"\n"):
                self._hold(part[: -2 if part.endswith(b"\r\n") else -1])
                pieces.append(self._take(update=False))
            elif part.endswith(b"\r"):
                self._hold(part[:-1])
                if index < len(parts):
                    pieces.append(self._take(update=True))
                else:
                    self._after_return = True
            else:
                self._hold(part)
                if len(self._held) >= self._line_max_bytes:
                    pieces.append(self._take(update=False))
        return [piece for piece in pieces if piece.text or not piece.update]

    def finish(self) -> list[Piece]:
        """The last line, when the stream ended inside it."""
        self._after_return = False
        return [self._take(update=False)] if self._held else []

    def _hold(self, part: bytes) -> None:
        self._held += part

    def _take(self, *, update: bool) -> Piece:
        text = bytes(self._held)
        self._held = bytearray()
        return Piece(text, update)


def redraw_possible(fd: int) -> bool:
    """Whether a line on ``fd`` can be erased: it is a terminal, and TERM is not ``dumb``."""
    return os.isatty(fd) and os.environ.get("TERM") != "dumb"


def colour_wanted(fd: int) -> bool:
    """Whether prefixes on ``fd`` are coloured: it is a terminal that can, and NO_COLOR is not set."""
    return redraw_possible(fd) and not os.environ.get("NO_COLOR")


def _in_a_row(text: bytes) -> bytes:
    """Text for a terminal, which does not go on in the next row where that is too narrow."""
    return _NO_WRAP + text + _WRAP


class Writer:
    """Writes to descriptors in a thread of its own, in order, so that a blocked terminal blocks nothing else.

    It accepts all data. The caller checks ``full`` first and waits for ``on_change``. ``on_change`` is called
    in the thread: when room appears, when all is written, and when a descriptor fails.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._queue: deque[tuple[int, bytearray]] = deque()
        self._pending_bytes = 0
        self._failed: dict[int, OSError] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="hororun-writer", daemon=True).start()

    @property
    def full(self) -> bool:
        """Whether callers should wait before the next ``put``."""
        return self._pending_bytes > _HIGH_WATER_BYTES

    @property
    def idle(self) -> bool:
        """Whether all is written."""
        return self._pending_bytes == 0

    def put(self, fd: int, data: bytes) -> None:
        """Queues ``data``; data for a descriptor that has failed is dropped."""
        if data and fd not in self._failed:
            with self._changed:
                if self._queue and self._queue[-1][0] == fd and len(self._queue[-1][1]) < _WRITE_BYTES:
                    self._queue[-1][1].extend(data)  # many small pieces are one entry
                else:
                    self._queue.append((fd, bytearray(data)))
                    self._pending_bytes += _ITEM_BYTES
                self._pending_bytes += len(data)
                self._changed.notify()

    def failure(self, fd: int) -> OSError | None:
        """The error after which a descriptor takes no more; None: there was none."""
        return self._failed.get(fd)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                fd, data = self._queue.popleft()
            self._write(fd, data)
            with self._changed:
                before = self._pending_bytes
                self._pending_bytes -= len(data) + _ITEM_BYTES
                notable = self._pending_bytes <= _LOW_WATER_BYTES < before or self._pending_bytes == 0
            if notable or fd in self._failed:
                self._on_change()

    def _write(self, fd: int, data: bytearray) -> None:
        view = memoryview(data)
        while view and fd not in self._failed:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:  # someone made our stdout nonblocking: wait until it takes more
                select.select([], [fd], [])
            except OSError as error:
                self._failed[fd] = error


class Printer:
    """Turns the output of ranks into lines of the console.

    Args:
        write: takes a stream (1 or 2) and bytes.
        size: number of ranks; prefixes are as wide as the highest rank needs.
        prefix: whether lines begin with their rank.
        timestamp: whether prefixes have the time.
        streams: whether prefixes have the stream, in Horovod's form.
        terminals: which of the streams 1 and 2 are terminals.
        coloured: which of them take colours.
    """

    def __init__(
        self,
        write: Callable[[int, bytes], None],
        size: int,
        *,
        prefix: bool = True,
        timestamp: bool = False,
        streams: bool = False,
        terminals: frozenset[int] = frozenset(),
        coloured: frozenset[int] = frozenset(),
    ) -> None:
        self._write = write
        self._width = len(str(size - 1))
        self._prefix = prefix
        self._hosts: Sequence[str] = ()
        self._timestamp = timestamp
        self._streams = streams
        self._terminals = terminals
        self._coloured = coloured
        self._splitters: dict[tuple[int, int], LineSplitter] = {}
        self._shown_s: dict[tuple[int, int], float] = {}
        self._update_is_shown = False
        self._live = b""
        """The line at the bottom of the terminal, below the update of a rank if there is one."""
        self._update, self._update_of = b"", (-1, 0)
        """The last one, with the stream that it is of; it goes with the next line of that stream."""
        self._rows = 0
        """Rows of the terminal that these two have now."""

    def place(self, hosts: Sequence[str], *, named: bool) -> None:
        """``hosts``: of each rank; ``named``: from now on prefixes have that, too."""
        self._width = len(str(len(hosts) - 1))
        self._hosts = hosts if named else ()

    def feed(self, rank: int, stream: int, data: bytes, now_s: float) -> None:
        """``data`` came from a stream of a rank."""
        splitter = self._splitters.setdefault((rank, stream), LineSplitter())
        self._show(rank, stream, splitter.feed(data), now_s)

    def finish(self, rank: int, now_s: float) -> None:
        """The rank has ended: shows its unfinished lines."""
        for stream in (1, 2):
            splitter = self._splitters.pop((rank, stream), None)
            if splitter is not None:
                self._show(rank, stream, splitter.finish(), now_s)
            if self._live and self._update and self._update_of == (rank, stream):
                line, self._update = self._update + b"\n", b""
                self._beside_live(stream, line)

    def say(self, text: bytes) -> None:
        """Shows whole lines of hororun's own, on stderr."""
        if self._live:
            self._beside_live(2, text)
        else:
            self._write(2, self._erase(2) + text)

    def show_live(self, text: bytes) -> None:
        """Shows a line at the bottom of the terminal, which stderr is, in the place of the one before; empty: none.

        It is as wide as there is room, and so is the update of a rank above it: neither goes on in the next row.
        """
        if text or self._live:
            before, self._live = self._live, text
            if not before:
                self._erase_update()
            self._beside_live(2, b"")
            if not text:
                self._update_is_shown = bool(self._update)
                self._write(2, _in_a_row(self._update + b"\r") if self._update else b"")
                self._update = b""

    def _beside_live(self, stream: int, lines: bytes) -> None:
        """Writes whole lines above it, and draws it again."""
        erased = _ERASED_ROWS[self._rows]
        shown = [each for each in (self._update, self._live) if each] if self._live else []
        self._rows = len(shown)
        drawn = _in_a_row(b"\r\n".join(shown) + b"\r") if shown else b""
        for fd, data in ((2, erased), (stream, lines), (2, drawn)):
            if data:
                self._write(fd, data)

    def _erase_update(self) -> None:
        if self._update_is_shown:
            self._write(min(self._terminals), _ERASE_LINE)
            self._update_is_shown = False

    def close(self) -> None:
        """Shows the unfinished lines that are left and leaves the cursor on a line of its own."""
        self.show_live(b"")
        for rank in sorted({rank for rank, _ in self._splitters}):
            self.finish(rank, float("inf"))
        if self._update_is_shown:
            self._write(min(self._terminals), b"\n")
            self._update_is_shown = False

    def _show(self, rank: int, stream: int, pieces: list[Piece], now_s: float) -> None:
        out = bytearray()
        start = self._start_of_line(rank, stream)
        if self._live and stream in self._terminals:
            for piece in pieces:
                text = start + _MOVES.sub(b"", piece.text)
                update = piece.update or piece.text.endswith(_UP)
                out += b"" if update else text + b"\n"
                if update:
                    self._update, self._update_of = text, (rank, stream)
                elif self._update_of == (rank, stream):
                    self._update = b""
            if pieces:
                self._beside_live(stream, bytes(out))
            return
        for piece in pieces:
            if not piece.update:
                line = start + piece.text + b"\n"
                is_inner = piece.text.endswith(_UP) and stream in self._terminals
                out += self._erase(stream) + (_in_a_row(line) if is_inner else line)
            elif stream in self._terminals:
                out += self._erase(stream) + _in_a_row(start + piece.text + b"\r")
                self._update_is_shown = True
                self._update, self._update_of = start + _MOVES.sub(b"", piece.text), (rank, stream)
            elif now_s - self._shown_s.get((rank, stream), float("-inf")) >= _UPDATE_INTERVAL_S:
                out += start + piece.text + b"\n"
                self._shown_s[rank, stream] = now_s
        if out:
            self._write(stream, bytes(out))

    def _erase(self, stream: int) -> bytes:
        if not self._update_is_shown or stream not in self._terminals:
            return b""
        self._update_is_shown, self._update = False, b""
        return _ERASE_LINE

    def _start_of_line(self, rank: int, stream: int) -> bytes:
        if not self._prefix:
            return b""
        width = 0 if self._streams else self._width
        text = f"[{rank:{width}}{f' {self._hosts[rank]}' if self._hosts else ''}]"
        if self._streams:
            text = f"{time.asctime() if self._timestamp else ''}{text}<{'stdout' if stream == 1 else 'stderr'}>:"
        elif self._timestamp:
            text = f"{datetime.now().isoformat(timespec='milliseconds')} {text}"
        if stream in self._coloured:
            text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
        return text.encode() + (b"" if self._streams else b" ")
