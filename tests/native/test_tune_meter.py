"""What a sample of the autotuner is: programs with known times of their steps."""

from __future__ import annotations

import random
from types import ModuleType

import pytest

MS = 1_000_000


class Meter:
    """``hr_meter`` with a clock of its own."""

    def __init__(self, native: ModuleType, steps: int = 10) -> None:
        self._lib = native.lib
        self._self = native.ffi.gc(self._lib.shim_meter_create(steps), self._lib.shim_meter_destroy)
        self.now_ns = 1000 * MS
        self.samples: list[float] = []

    def note(self, name: int, size: int) -> None:
        cost = self._lib.shim_meter_note(self._self, name, size, self.now_ns)
        if cost >= 0:
            self.samples.append(cost)

    def step(self, tensors: list[tuple[int, int]], step_ns: int) -> None:
        """Equal parts of the time before each tensor."""
        for name, size in tensors:
            self.now_ns += step_ns // len(tensors)
            self.note(name, size)

    def restart(self) -> None:
        self._lib.shim_meter_restart(self._self)


MODEL = [(11, 4000), (12, 64_000), (13, 64_000), (14, 8), (15, 100_000), (16, 1000)]
BYTES = sum(size for _, size in MODEL)


def test_a_sample_is_the_time_of_a_byte(native: ModuleType) -> None:
    meter = Meter(native)
    for _ in range(40):
        meter.step(MODEL, 60 * MS)
    assert len(meter.samples) == 3
    assert meter.samples == pytest.approx([60 * MS / BYTES] * 3)


def test_pauses_now_and_then_change_nothing(native: ModuleType) -> None:
    meter = Meter(native)
    for step in range(40):
        meter.step(MODEL, 60 * MS)
        if step % 4 == 3:
            meter.now_ns += 3_000_000 * MS  # a validation, a checkpoint
    assert meter.samples == pytest.approx([60 * MS / BYTES] * 3)


def test_after_a_change_the_steps_that_it_falls_into_do_not_count(native: ModuleType) -> None:
    meter = Meter(native)
    for _ in range(8):
        meter.step(MODEL, 60 * MS)
    meter.restart()
    meter.step(MODEL, 999 * MS)
    for _ in range(12):
        meter.step(MODEL, 30 * MS)
    assert meter.samples == pytest.approx([30 * MS / BYTES])


EQUAL = [(name, 16_384) for name in range(1, 13)]


@pytest.mark.parametrize("first", range(len(EQUAL)))
def test_steps_of_many_equal_tensors_give_samples_after_every_change(native: ModuleType, first: int) -> None:
    """Between the choice of an anchor, or a change, and the anchor there may be one tensor only: no whole step."""
    model = EQUAL[first:] + EQUAL[:first]
    meter = Meter(native, steps=2)
    for _ in range(60):
        before = len(meter.samples)
        for name, size in model:
            meter.now_ns += MS
            meter.note(name, size)
            if len(meter.samples) > before:  # what is left of the batch comes while the change is under way
                meter.restart()
                break
    assert len(meter.samples) > 10
    assert meter.samples[2:] == pytest.approx([12 * MS / (12 * 16_384)] * (len(meter.samples) - 2))


def test_another_program_is_noticed_before_a_whole_step(native: ModuleType) -> None:
    meter = Meter(native)
    for _ in range(2):
        meter.step(EQUAL, 60 * MS)
    meter.note(*EQUAL[0])  # an anchor is chosen
    for _ in range(40):
        meter.step([(name + 100, size) for name, size in MODEL], 20 * MS)
    assert meter.samples[-1] == pytest.approx(20 * MS / BYTES)


def test_what_comes_once_is_no_step(native: ModuleType) -> None:
    """The broadcast of the parameters and of the optimizer's state, each larger than any gradient."""
    meter = Meter(native)
    meter.note(98, BYTES)
    meter.note(99, 2 * BYTES)
    for _ in range(40):
        meter.step(MODEL, 60 * MS)
    assert meter.samples == pytest.approx([60 * MS / BYTES] * len(meter.samples))
    assert len(meter.samples) >= 2


def test_a_small_tensor_in_between_does_not_cut_steps(native: ModuleType) -> None:
    """A loss that is averaged five times per step repeats first, but says nothing of the step."""
    meter = Meter(native)
    for _ in range(40):
        for _ in range(5):
            meter.note(7, 4)
        meter.step(MODEL, 60 * MS)
    assert len(meter.samples) == 3
    assert meter.samples[-1] == pytest.approx(60 * MS / (BYTES + 20), rel=1e-3)


def test_tensors_without_names_are_told_apart_by_size(native: ModuleType) -> None:
    meter = Meter(native)
    for _ in range(40):
        meter.step([(0, size) for _, size in MODEL if size != 64_000], 60 * MS)
    assert len(meter.samples) == 3


def test_another_program_is_noticed(native: ModuleType) -> None:
    """The first model's tensors do not come any more."""
    meter = Meter(native)
    for _ in range(20):
        meter.step(MODEL, 60 * MS)
    before = len(meter.samples)
    for _ in range(40):
        meter.step([(name + 100, size) for name, size in MODEL], 20 * MS)
    assert len(meter.samples) > before
    assert meter.samples[-1] == pytest.approx(20 * MS / BYTES)


def test_names_that_never_repeat_give_no_sample(native: ModuleType) -> None:
    meter = Meter(native)
    for name in range(1, 10_000):
        meter.now_ns += MS
        meter.note(name, 100)
    assert not meter.samples


def test_operations_without_data_count_for_nothing(native: ModuleType) -> None:
    meter = Meter(native)
    for _ in range(100):
        meter.step([(3, 0)], MS)
    assert not meter.samples


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_costs_are_positive(native: ModuleType, seed: int) -> None:
    chance = random.Random(seed)
    meter = Meter(native, chance.choice([1, 2, 10, 1000]))
    for _ in range(20_000):
        meter.now_ns += chance.choice([0, 1, 1000, MS])
        meter.note(chance.choice([0, *range(1, 40), chance.getrandbits(64)]), chance.choice([0, 1, 77, 1 << 40]))
        if chance.random() < 0.001:
            meter.restart()
    assert all(cost > 0 for cost in meter.samples)
