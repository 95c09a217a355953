"""What a rank counts of its steps: their parts, the slowest rank, and the page that it shares with hororun."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from jobs import TORCH_S, Hororun
from torch.utils.data import DataLoader, Dataset, IterableDataset

from horo.core.memory import create_memory
from horo.diagnostics import page
from horo.diagnostics.board import BOARD_BYTES, Board
from horo.diagnostics.page import SAMPLES_MAX, Page
from horo.diagnostics.slowest import Slowest
from horo.inherited import words_of
from horo.runner.agent.rank_counts import RankCounts
from horo.runner.agent.rank_reports import NoteReader
from horo.runner.agent.rank_summary import NAMES_MAX, read_summary
from horo.runner.loop import Loop
from horo.torch.engine.steps import StepMeter

if TYPE_CHECKING:
    from pathlib import Path

SUMS = (100, 50, 40, 30, 2048, 8, 4)
"""After steps and measured: ns, waiting, moving, loading, bytes, tensors, batches."""


@pytest.fixture
def fd() -> Iterator[int]:
    made = page.create()
    yield made
    os.close(made)


def counted(fd: int, steps: int, size: int = 1) -> Page:
    """The page of a rank that has done so many steps."""
    made = Page(words_of(fd))
    made.begin(size=size, cores=4, ranks_here=size, via="")
    made.step_ends(steps, steps - 1, *SUMS)
    return made


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
    counted(fd, 9)
    mine.step_ends(3, 2, *SUMS)
    found = page.read(fd)
    assert found is not None and found["steps"] == 3
    mine.close()
    assert page.read(fd) is None
    later = counted(fd, 1)
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
        mine = counted(fd, 3, 2)
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
    mine = counted(fd, 3, 2)
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
    mine = counted(fd, 3)
    line = json.dumps({"summary": {**(page.read(fd) or {}), "unused": names, "samples": columns}}).encode() + b"\n"
    mine.close()
    os.close(fd)
    for start in range(0, len(line), 4096):
        reader.feed(line[start : start + 4096])
    assert reader.note.summary is not None and len(reader.note.summary.unused) == NAMES_MAX


S = 1_000_000_000


class Clock:
    """Stands still but for what is added to it; it is a context's counters, too."""

    def __init__(self) -> None:
        self.ns = 0
        self.counters = (0, 0, 0, 0, 0)

    def work(self) -> tuple[int, int, int, int, int]:
        return self.counters


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("time.perf_counter_ns", lambda: made.ns)
    return made


def meter_of(clock: Clock) -> StepMeter:
    meter = StepMeter(clock)
    meter.end_step(0)
    return meter


class Slow(Dataset[int]):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        self.clock.ns += 5 * S
        return index


class Nested(IterableDataset[int]):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __iter__(self) -> Iterator[Any]:
        yield from DataLoader(Slow(self.clock), batch_size=None)


def test_a_loader_that_reads_from_a_loader_counts_once(clock: Clock) -> None:
    meter = meter_of(clock)
    for _ in DataLoader(Nested(clock), batch_size=None):
        meter.end_step(0)
        assert (meter.stats().last.loading, meter.stats().last.seconds) == (5, 5)


def test_steps_of_another_thread_take_nothing_from_what_this_one_has_waited(clock: Clock) -> None:
    meter = meter_of(clock)
    batches = iter(DataLoader(Slow(clock)))
    next(batches)
    meter.end_step(0)
    other = threading.Thread(target=meter.end_step, args=(0,))
    other.start()
    other.join()
    assert meter.stats().last.loading == 0
    next(batches)
    meter.end_step(0)
    assert (meter.stats().last.loading, meter.stats().total.loading) == (5, 10)


def test_what_the_core_corrects_by_a_little_is_not_less_than_nothing(clock: Clock) -> None:
    clock.counters = (100, 100, 0, 0, 0)
    meter = meter_of(clock)
    clock.counters = (99, 99, 0, 0, 0)  # the rate of the processor's clock is known better now
    meter.end_step(0)
    assert meter.stats().last.moving == meter.stats().last.waiting == 0


RANKS = (2, 5, 7)
MS = 1000


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    """Of three ranks, in one memory."""
    memory = create_memory(BOARD_BYTES * len(RANKS))
    made = [Board(os.dup(memory), rank, RANKS) for rank in RANKS]
    os.close(memory)
    yield made
    for board in made:
        board.close()


def do_steps(boards: list[Board], first: int, count: int, late: int | None, *, behind_us: int = 4 * MS) -> None:
    """Steps of 20 ms, in which the others wait for one rank; None: for each in turn."""
    for number in range(first, first + count):
        last = number % len(boards) if late is None else late
        for place, board in enumerate(boards):
            board.add(number, 0 if place == last else behind_us, 0, 20 * MS)


def test_every_rank_sees_the_slow_one_by_its_number(boards: list[Board]) -> None:
    do_steps(boards, 1, 20, late=1)
    assert [board.look().slowest() for board in boards] == [Slowest(5, 1.0, 0.004, 0.0)] * 3


def test_of_healthy_ranks_none_is_the_slowest(boards: list[Board]) -> None:
    assert boards[0].look().slowest() is None
    do_steps(boards, 1, 9, late=1)
    assert boards[0].look().slowest() is None, "these are too few steps"
    do_steps(boards, 10, 60, late=None)
    assert boards[0].look().slowest() is None
    do_steps(boards, 70, 64, late=1, behind_us=900)
    assert boards[0].look().slowest() is None, "it is less than 5 % of a step"


def test_only_the_last_steps_count_and_only_those_of_all(boards: list[Board]) -> None:
    do_steps(boards, 1, 200, late=0)
    do_steps(boards, 201, 64, late=2)
    boards[0].add(265, 0, 0, 20 * MS)
    slowest = boards[0].look().slowest()
    assert slowest is not None and (slowest.rank, slowest.share) == (7, 1.0)
    boards[1].add(1 << 40, 1 << 40, 1 << 40, 1 << 40)  # a step of a clock that has jumped
    assert boards[0].look().slowest() is not None


def test_a_rank_that_has_done_no_step_leaves_the_slowest_unknown(boards: list[Board]) -> None:
    do_steps(boards[:2], 1, 30, late=0)
    assert boards[0].look().slowest() is None


def test_a_closed_board_takes_steps_of_another_thread(boards: list[Board]) -> None:
    do_steps(boards, 1, 20, late=1)
    seen = boards[0].look()
    boards[0].close()
    boards[0].add(21, 0, 0, 1)
    boards[0].close()
    assert boards[0].look().slowest() is None
    assert seen.slowest() is not None


class Core:
    """Blocked for 5 ms more at each look, of which 1 ms moves data."""

    def __init__(self) -> None:
        self.looks = 0

    def work(self) -> tuple[int, int, int, int, int]:
        self.looks += 1
        return 5_000_000 * self.looks, 1_000_000 * self.looks, 0, 0, 0


def test_a_meter_writes_what_others_wait_for(boards: list[Board], monkeypatch: pytest.MonkeyPatch) -> None:
    meter = StepMeter(Core(), board=boards[0])
    for step in range(13):
        monkeypatch.setattr("time.perf_counter_ns", lambda now=20_000_000 * step: now)
        meter.end_step(0)
        if step:
            boards[1].add(step + 1, 0, 0, 20 * MS)
            boards[2].add(step + 1, 4 * MS, 0, 20 * MS)
    assert meter.stats().slowest == Slowest(5, 1.0, 0.004, 0.0)
    assert StepMeter(Core()).stats().slowest is None
