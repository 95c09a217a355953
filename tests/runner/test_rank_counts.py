"""What a rank counts in the page that it shares with hororun, which outlives it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from jobs import TORCH_S, Hororun

from horo.diagnostics import page
from horo.diagnostics.page import SAMPLES_MAX, Page
from horo.inherited import words_of
from horo.runner.agent.rank_counts import RankCounts
from horo.runner.agent.rank_reports import NoteReader
from horo.runner.agent.rank_summary import NAMES_MAX, read_summary
from horo.runner.loop import Loop

if TYPE_CHECKING:
    from pathlib import Path

SUMS = (100, 50, 40, 30, 2048, 8, 4)
"""After steps and measured: ns, waiting, moving, loading, bytes, tensors, batches."""


@pytest.fixture
def fd() -> Iterator[int]:
    made = page.create()
    yield made
    os.close(made)


@pytest.fixture
def mine(fd: int) -> Iterator[Page]:
    made = Page(words_of(fd))
    made.begin(size=2, cores=4, ranks_here=2, via="shared memory")
    yield made
    made.close()


def test_what_a_rank_counts_is_read_as_its_summary(fd: int, mine: Page) -> None:
    assert page.read(fd) is None, "no step has been counted"
    mine.step_begins(1)
    found = page.read(fd)
    assert found is not None and (found["steps"], found["within"]) == (0, 1)
    mine.step_ends(3, 2, *SUMS)
    mine.add_sample(2, 25, 15)
    mine.add_sample(3, 1 << 40, 15)
    found = page.read(fd)
    assert found is not None and found["pid"] == os.getpid()
    summary = read_summary(found)
    assert summary is not None
    assert (summary.steps, summary.within, summary.measured, summary.size, summary.via) == (3, 0, 2, 2, "shared memory")
    assert 0 < summary.peak <= 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (summary.ns, summary.waiting, summary.moving, summary.loading) == SUMS[:4]
    assert summary.samples == ((2, 25, 15), (3, (1 << 32) - 1, 15))
    mine.step_ends(4, 3, 100, -1, *SUMS[2:])
    found = page.read(fd, with_samples=False)
    assert found is not None and (found["waiting"], found["samples"]) == (0, [[], [], []])


def test_a_page_that_is_full_keeps_the_samples_of_every_second_step(fd: int, mine: Page) -> None:
    full = [mine.add_sample(number, 1, 2) for number in range(1, SAMPLES_MAX + 1)]
    assert full == [False] * (SAMPLES_MAX - 1) + [True]
    mine.thin_out(2)
    mine.step_ends(SAMPLES_MAX, SAMPLES_MAX, *SUMS)
    found = page.read(fd)
    assert found is not None and found["samples"] == [
        list(range(2, SAMPLES_MAX + 1, 2)),
        [1] * (SAMPLES_MAX // 2),
        [2] * (SAMPLES_MAX // 2),
    ]


def test_one_job_of_a_process_counts_in_the_page_at_a_time(fd: int, mine: Page) -> None:
    other = Page(words_of(fd))
    other.begin(size=1, cores=1, ranks_here=1, via="")
    other.step_ends(9, 8, *SUMS)
    mine.step_ends(3, 2, *SUMS)
    found = page.read(fd)
    assert found is not None and found["steps"] == 3
    mine.close()
    assert page.read(fd) is None
    later = Page(words_of(fd))
    later.begin(size=1, cores=1, ranks_here=1, via="")
    later.step_ends(1, 0, *SUMS)
    found = page.read(fd)
    assert found is not None and found["steps"] == 1
    later.close()


@pytest.mark.parametrize("words", [None, "", "x:y", "-1:5", "99999:1"])
def test_without_a_page_a_rank_counts_for_itself(words: str | None) -> None:
    mine = Page(words)
    mine.begin(size=1, cores=1, ranks_here=1, via="")
    mine.add_sample(1, 2, 3)
    assert mine.samples() == [(1, 2, 3)]


def test_what_other_programs_write_into_the_page_harms_nobody(fd: int, mine: Page) -> None:
    mine.step_ends(3, 2, *SUMS)
    whole = os.pread(fd, 1 << 20, 0)
    for start in range(0, 256, 8):
        os.pwrite(fd, b"\xff" * 8, start)
        found = page.read(fd)
        assert found is None or read_summary(found) is None or isinstance(found["steps"], int)
        os.pwrite(fd, whole, 0)
    os.ftruncate(fd, 0)
    assert page.read(fd) is None
    os.ftruncate(fd, len(whole))


def test_the_end_of_a_rank_tells_what_it_has_not_told_itself_and_a_look_the_present_state() -> None:
    told: list[tuple[int, dict[str, dict[str, int]]]] = []
    loop, fd = Loop(), page.create()
    try:
        counts = RankCounts(loop, lambda rank, line: told.append((rank, json.loads(line))))
        counts.started(os.getsid(0), 5, fd)
        mine = Page(words_of(fd))
        mine.begin(size=2, cores=4, ranks_here=2, via="TCP")
        mine.step_ends(3, 2, *SUMS)
        counts.watch(0.001)
        loop.run_until(lambda: len(told) >= 2)
        counts.watch(0)
        rank, note = told[-1]
        assert rank == 5 and note["now"]["steps"] == 3 and note["now"]["peak"] > 1 << 20
        told.clear()
        counts.ended(os.getsid(0))
        assert [(rank, list(note), note["summary"]["steps"]) for rank, note in told] == [(5, ["summary"], 3)]
        counts.ended(os.getsid(0))
        assert len(told) == 1
        mine.close()
    finally:
        loop.close()


def test_a_process_of_another_session_with_the_number_of_a_rank_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank in a PID namespace writes its number there, which here is that of any process."""
    told: list[bytes] = []
    loop, fd = Loop(), page.create()
    signalled: list[int] = []
    monkeypatch.setattr("horo.runner.agent.rank_counts.send_signal", lambda pids, _signal: signalled.extend(pids))
    monkeypatch.setattr("horo.runner.agent.rank_counts.shows_stack", bool)
    mine = Page(words_of(fd))
    mine.begin(size=2, cores=4, ranks_here=2, via="TCP")
    mine.step_ends(3, 2, *SUMS)
    try:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True) as rank:
            counts = RankCounts(loop, lambda _rank, line: told.append(line))
            counts.started(rank.pid, 5, fd)
            counts.watch(60)
            counts.show_stacks()
            counts.close()
        assert (json.loads(told[0])["now"]["peak"], signalled) == (0, [])
    finally:
        mine.close()
        loop.close()


KILLED = """
import os, pathlib, signal, sys, time
from horo.diagnostics.page import Page
rank, flag = int(os.environ["HOROVOD_RANK"]), pathlib.Path("waits")
page = Page(os.environ["HORO_COUNTS_FD"])
page.begin(size=2, cores=2, ranks_here=2, via="shared memory")
hoard = b"x" * ((200 << 20) * rank)
for step in range(1, 26):
    page.step_begins(step)
    page.step_ends(step, step - 1, 100_000_000 * (step - 1), 0, 0, 0, 5 << 10, 4, 2)
if rank == 0:
    page.step_begins(26)
    flag.touch()
    time.sleep(600)
while not flag.exists():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_was_killed_is_on_the_card(hororun: Hororun, tmp_path: Path) -> None:
    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(KILLED)
    words = ("-np", "2", "--failure-seconds", "0", "--summary", "--json-report", str(report), str(script))
    done = hororun.run(*words, cwd=tmp_path)
    assert done.returncode == 137, done.stderr
    told = json.loads(report.read_text())
    ranks = {each["rank"]: each for each in told["ranks"]}
    assert told["training"]["memory"]["most"] > told["training"]["memory"]["least"] + (150 << 20) > 150 << 20
    assert (ranks[1]["steps"], ranks[1]["within"], ranks[0]["within"]) == (25, None, 26)
    assert "25 steps" in done.stderr and "; rank 1 was after step 25" in done.stderr
    assert "  a step  " in done.stderr and "  traffic  " in done.stderr


LONG_NAMES = """
import horo.torch as hvd
from horo.torch.engine.runtime import current

for find_unused in (lambda: [str(number) + 9000 * "\\u00e4" for number in range(64)], lambda: 1 / 0):
    hvd.init()
    current().course.find_unused = find_unused
    hvd.shutdown()
"""


def test_neither_many_long_names_nor_sums_that_cannot_be_told_cost_the_card(hororun: Hororun, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LONG_NAMES)
    done = hororun.start("-np", "1", "--summary", str(script)).finish(3 * TORCH_S)
    assert done.returncode == 0, done.stderr
    assert f"{NAMES_MAX} parameters had no gradient" in done.stderr


def test_the_longest_summary_is_read() -> None:
    names = ["\U0001f600" * 203] * NAMES_MAX
    columns = [[(1 << 32) - 1] * SAMPLES_MAX] * 3
    reader, fd = NoteReader(), page.create()
    mine = Page(words_of(fd))
    mine.begin(size=1, cores=1, ranks_here=1, via="")
    mine.step_ends(3, 2, *SUMS)
    line = json.dumps({"summary": {**(page.read(fd) or {}), "unused": names, "samples": columns}}).encode() + b"\n"
    mine.close()
    os.close(fd)
    for start in range(0, len(line), 4096):
        reader.feed(line[start : start + 4096])
    assert reader.note.summary is not None and len(reader.note.summary.unused) == NAMES_MAX
