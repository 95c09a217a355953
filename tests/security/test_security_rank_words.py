"""Nothing that a rank writes, and be it much, ends hororun, holds it up or changes the exit code."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import Hororun, make_remote_shell

from horo.runner.agent.rank_reports import Note, NoteReader
from horo.runner.job.output import LineSplitter, Writer
from horo.runner.job.report import Ending, awaited, report, root_cause

DIGITS = b"9" * 5000


@pytest.mark.parametrize("digits", [DIGITS, b"9" * 12, b"7"])
def test_a_rank_that_points_at_a_number_which_no_rank_has_is_the_cause_itself(digits: bytes) -> None:
    ending = Ending(0, "h", code=3, stderr_tail=b"PeerLostError: rank " + digits + b" is gone\n")
    other = Ending(1, "h", signal=15, asked=True)
    assert root_cause([ending, other]) == ending
    assert b"exited with code 3" in report(ending, [ending, other])
    awaited([ending, other], {})


@given(st.binary(max_size=300) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_note_is_taken_or_passed_over(line: bytes | str) -> None:
    reader = NoteReader()
    reader.feed((line.encode() if isinstance(line, str) else line) + b"\n")
    for name in ("joined", "error", "where", "points_at"):
        reader.feed(b'{"%s": %s}\n' % (name.encode(), line.encode() if isinstance(line, str) else b"[]"))
    ending = Ending(0, "h", code=3, note=reader.note)
    assert root_cause([ending]) == ending
    report(ending, [ending])


@pytest.mark.parametrize(
    "line",
    [b"[" * 60000, b'{"points_at": ' + DIGITS + b"}", b'{"points_at": true}', b'{"points_at": -1}', b'{"x": NaN}'],
    ids=["deep", "digits", "bool", "negative", "nan"],
)
def test_a_note_that_is_none_is_passed_over(line: bytes) -> None:
    reader = NoteReader()
    reader.feed(line + b"\n")
    assert reader.note == Note()
    reader.feed(b'{"joined": true}\n')
    assert reader.note == Note(joined=True)


def test_hororun_survives_a_rank_that_writes_digits_and_notes_without_end(tmp_path: Path) -> None:
    script = (
        "import os\n"
        "fd = int(os.environ['HORO_END_PIPE'].partition(':')[0])\n"
        "os.write(fd, b'[' * 60000 + b'\\n')\n"
        "os.write(2, b'PeerLostError: rank ' + b'9' * 5000 + b' is gone\\n')\n"
        "os._exit(3)\n"
    )
    runner = Hororun(make_remote_shell(tmp_path))
    try:
        done = runner.run("-np", "1", sys.executable, "-S", "-c", script)
    finally:
        runner.clean_up()
    assert done.returncode == 3
    assert "hororun: rank 0 on localhost exited with code 3; the job was ended\n" in done.stderr


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
