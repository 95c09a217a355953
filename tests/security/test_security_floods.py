"""Ranks, and what they leave behind, cannot hold hororun up or fill its memory by writing much."""

from __future__ import annotations

import os
import sys
import tracemalloc
from pathlib import Path

import pytest
from jobs import Hororun, make_remote_shell

from horo.runner.job.output import LineSplitter, Writer

FLOOD = (
    "import os, signal\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "if os.fork(): os._exit(5)\n"
    "while True: os.write(1, b'y\\n' * 2000)\n"
)
PIECE = b"ab"
COUNT = 20_000
TOLD_BYTES = PIECE * COUNT


@pytest.mark.parametrize("where", ["localhost:1", "one:1"], ids=["direct", "agent"])
def test_the_end_of_a_rank_is_known_although_what_it_left_behind_writes_on(tmp_path: Path, where: str) -> None:
    runner = Hororun(make_remote_shell(tmp_path))
    try:
        with Path(os.devnull).open("wb") as nowhere:
            done = runner.run(
                "-np", "1", "--grace-seconds", "0.3", sys.executable, "-S", "-c", FLOOD, where=where, stdout=nowhere
            )
    finally:
        runner.clean_up()
    assert done.returncode == 5
    assert "exited with code 5" in done.stderr


def held_bytes(base: int) -> int:
    return tracemalloc.get_traced_memory()[0] - base


def test_a_line_of_many_small_writes_is_held_once() -> None:
    splitter = LineSplitter()
    tracemalloc.start()
    try:
        base = tracemalloc.get_traced_memory()[0]
        for _ in range(COUNT):
            splitter.feed(bytearray(PIECE))
        assert held_bytes(base) < 2 * len(TOLD_BYTES)
    finally:
        tracemalloc.stop()
    assert splitter.finish()[0].text == TOLD_BYTES


@pytest.mark.parametrize("streams", [1, 2])
def test_what_is_queued_counts_with_what_it_costs(streams: int) -> None:
    """A pipe that nobody reads takes 64 KiB; the rest of many small writes to it, and between two, waits in memory."""
    pipes = [os.pipe() for _ in range(streams)]
    writer = Writer(lambda: None)
    for _, fd in pipes:
        writer.put(fd, b"x" * (1 << 20))
    tracemalloc.start()
    try:
        base = tracemalloc.get_traced_memory()[0]
        put = 0
        while not writer.full and put < COUNT:
            writer.put(pipes[put % streams][1], bytes(bytearray(PIECE)))
            put += 1
        held = held_bytes(base)
        counted = writer._pending_bytes - streams * (1 << 20)
        assert held < (4 * len(TOLD_BYTES) if streams == 1 else 3 * counted)
    finally:
        tracemalloc.stop()
    for read_fd, _ in pipes:
        os.close(read_fd)  # ends the writer's waiting


def test_bytes_stay_in_order_between_streams() -> None:
    read_fd, write_fd = os.pipe()
    second = os.dup(write_fd)
    writer = Writer(lambda: None)
    for number in range(1000):
        writer.put((write_fd, second)[number % 2], b"%d," % number)
    expected = b"".join(b"%d," % number for number in range(1000))
    got = b""
    while len(got) < len(expected):
        got += os.read(read_fd, 1 << 16)
    assert got == expected
