"""The parts of a step's time, by a clock of the test's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

from horo.torch.engine.steps import StepMeter

if TYPE_CHECKING:
    pass

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
