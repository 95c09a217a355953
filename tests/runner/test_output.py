"""Lines, prefixes and the writer."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from horo.runner.job.output import LineSplitter, Piece, Printer, Writer
from horo.runner.job.rank_files import RankFiles

text = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\xff\xfe", "é".encode(), b" "])).map(b"".join)


def split(chunks: list[bytes]) -> list[Piece]:
    splitter = LineSplitter()
    return [piece for chunk in chunks for piece in splitter.feed(chunk)] + splitter.finish()


@given(text, st.lists(st.integers(0, 6)))
def test_lines_do_not_depend_on_how_the_stream_arrives(data: bytes, cuts: list[int]) -> None:
    chunks, rest = [], data
    for size in cuts:
        chunks.append(rest[:size])
        rest = rest[size:]
    assert split([*chunks, rest]) == split([data])


@given(text.map(lambda data: data.replace(b"\r", b"")))
def test_nothing_is_lost_and_nothing_invented(data: bytes) -> None:
    lines = data.split(b"\n")
    assert [piece.text for piece in split([data])] == (lines[:-1] if not lines[-1] else lines)


def test_a_carriage_return_ends_an_update_and_before_a_newline_a_line() -> None:
    assert split([b"\r10%\r20%\r", b"\n30%\rend"]) == [
        Piece(b"10%", True),
        Piece(b"20%", False),
        Piece(b"30%", True),
        Piece(b"end", False),
    ]


def test_a_line_without_end_is_cut_before_it_fills_memory() -> None:
    splitter = LineSplitter(line_max_bytes=1000)
    pieces = [piece for _ in range(10) for piece in splitter.feed(b"x" * 300)] + splitter.finish()
    assert b"".join(piece.text for piece in pieces) == b"x" * 3000
    assert max(len(piece.text) for piece in pieces) <= 1300


class Screen:
    """Keeps what a printer writes."""

    def __init__(self) -> None:
        self.streams = {1: b"", 2: b""}

    def write(self, stream: int, data: bytes) -> None:
        self.streams[stream] += data


def test_prefixes_are_as_wide_as_the_highest_rank() -> None:
    screen = Screen()
    printer = Printer(screen.write, 11)
    printer.feed(3, 1, b"a\n\xff\xfe\nunfinished", 0.0)
    printer.feed(10, 1, b"b\n", 0.0)
    printer.feed(10, 2, b"c\n", 0.0)
    printer.finish(3, 0.0)
    assert screen.streams == {1: b"[ 3] a\n[ 3] \xff\xfe\n[10] b\n[ 3] unfinished\n", 2: b"[10] c\n"}


def test_without_prefix_lines_stay_whole() -> None:
    screen = Screen()
    printer = Printer(screen.write, 2, prefix=False)
    printer.feed(0, 1, b"on", 0.0)
    printer.feed(1, 1, b"two\n", 0.0)
    printer.feed(0, 1, b"e\n", 0.0)
    assert screen.streams[1] == b"two\none\n"


def test_off_a_terminal_one_update_per_second_is_shown_and_every_line() -> None:
    screen = Screen()
    printer = Printer(screen.write, 1)
    for tenths in range(25):
        printer.feed(0, 2, b"\r%d" % tenths, tenths / 10)
    printer.feed(0, 2, b"\n", 2.5)
    assert screen.streams[2] == b"[0] 0\n[0] 10\n[0] 20\n[0] 24\n"


def test_on_a_terminal_updates_are_redrawn_in_place() -> None:
    screen = Screen()
    printer = Printer(screen.write, 2, terminals=frozenset({1, 2}), coloured=frozenset({2}))
    printer.feed(0, 2, b"\r1%\r2%\r", 0.0)
    printer.feed(1, 1, b"line\n", 0.0)
    printer.close()
    assert screen.streams[2] == b"\x1b[36m[0]\x1b[0m 1%\r\x1b[36m[0]\x1b[0m 2%\n"
    assert screen.streams[1] == b"\x1b[2K[1] line\n"


def test_a_timestamp_begins_each_line() -> None:
    screen = Screen()
    Printer(screen.write, 1, timestamp=True).feed(0, 1, b"a\n", 0.0)
    stamp, rest = screen.streams[1].split(b" ", 1)
    assert len(stamp) == len(b"2025-01-31T12:34:56.789")
    assert rest == b"[0] a\n"


def test_lines_of_a_script_of_horovods_begin_as_there() -> None:
    screen = Screen()
    printer = Printer(screen.write, 11, streams=True)
    printer.feed(3, 1, b"a\n\xff\n", 0.0)
    printer.feed(10, 2, b"b\n", 0.0)
    assert screen.streams == {1: b"[3]<stdout>:a\n[3]<stdout>:\xff\n", 2: b"[10]<stderr>:b\n"}
    screen = Screen()
    Printer(screen.write, 1, streams=True, timestamp=True).feed(0, 1, b"a\n", 0.0)
    stamp, rest = screen.streams[1].split(b"[0]", 1)
    assert time.strptime(stamp.decode(), "%a %b %d %H:%M:%S %Y")
    assert rest == b"<stdout>:a\n"


def test_the_writer_keeps_order_and_says_when_it_is_full_and_idle() -> None:
    changed = threading.Event()
    writer = Writer(changed.set)
    read_fd, write_fd = os.pipe()
    parts = [b"%d," % number * 1000 for number in range(4000)]
    for part in parts:
        writer.put(write_fd, part)
    assert writer.full
    assert not writer.idle
    got = b""
    while len(got) < sum(map(len, parts)):
        got += os.read(read_fd, 1 << 20)
    assert got == b"".join(parts)
    assert changed.wait(10)
    os.close(read_fd)
    os.close(write_fd)


def test_files_of_ranks_sort_by_rank(tmp_path: Path) -> None:
    files = RankFiles(str(tmp_path / "logs"), ["h"] * 11, named=False)
    os.write(files.fd(3, 2), b"err")
    assert (tmp_path / "logs" / "rank.03" / "stderr").read_bytes() == b"err"
    assert (tmp_path / "logs" / "rank.10" / "stdout").read_bytes() == b""
    assert files.name_of(files.fd(3, 2)) == "stderr of rank 3"
