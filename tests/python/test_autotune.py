"""Autotuning: its search on surfaces whose best point is known, its samples, its log; and in jobs of real processes."""

import csv
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankError, RankPool
from small_model import made, take_step

import horo.torch as hvd
from horo.autotune import Meter, Point, Search, Tuner, Winner, search
from horo.core.setup import KNOBS
from horo.torch.engine import runtime

SEARCH_MAX = 40


def run(
    counts: Sequence[int], first: Point, defaults: Point, cost: Callable[[Point], float], *, warmup: int = 0, most: int
) -> tuple[Winner, list[tuple[str, Point, float]]]:
    """The winner, and all that was measured."""
    walk, seen = search(counts, first, defaults, warmup=warmup, most=most), []
    stage, point = next(walk)
    while True:
        seen.append((stage, point, cost(point)))
        assert len(seen) < 1000
        try:
            stage, point = walk.send(seen[-1][2])
        except StopIteration as end:
            return end.value, seen


def bowl(best: Point, steepness: float = 0.2) -> Callable[[Point], float]:
    """Costs 1 at the best point, and more by a factor for each step away from it."""
    return lambda point: math.prod(1 + steepness * abs(a - b) for a, b in zip(point, best, strict=True))


def noisy(cost: Callable[[Point], float], seed: int, noise: float) -> Callable[[Point], float]:
    chance = random.Random(seed)
    return lambda point: cost(point) * math.exp(chance.gauss(0, noise))


points = st.lists(st.integers(1, 12), min_size=1, max_size=8).flatmap(
    lambda counts: st.tuples(
        st.just(counts), *[st.tuples(*(st.integers(0, count - 1) for count in counts)) for _ in range(3)]
    )
)


@given(points)
@settings(max_examples=300, deadline=None)
def test_without_noise_it_finds_the_bottom_of_a_bowl(case: tuple[list[int], Point, Point, Point]) -> None:
    counts, first, defaults, best = case
    winner, _ = run(counts, first, defaults, bowl(best), most=10_000)
    assert winner.point == best


@given(points, st.integers(1, SEARCH_MAX), st.integers(0, 5), st.tuples(st.integers(0, 2**32), st.floats(0, 3)))
@settings(max_examples=300, deadline=None)
def test_every_point_is_in_its_range_and_their_number_is_bounded_and_it_ends_no_slower(
    case: tuple[list[int], Point, Point, Point], most: int, warmup: int, chance: tuple[int, float]
) -> None:
    """No slower than it began, or than the defaults, by what it measured in the end, point against point."""
    (counts, first, defaults, best), (seed, noise) = case, chance
    winner, seen = run(counts, first, defaults, noisy(bowl(best), seed, noise), warmup=warmup, most=most)
    for _, point, _ in seen:
        assert all(0 <= index < count for index, count in zip(point, counts, strict=True))
    stages = [stage for stage, _, _ in seen]
    assert stages == [*["warmup"] * warmup, *stages[warmup:]]
    assert sum(stage not in ("warmup", "final") for stage in stages) <= max(most, 2) + 1  # a check is not left out
    assert all(point == first for stage, point, _ in seen if stage in ("warmup", "first"))
    finals = [(point, cost) for stage, point, cost in seen if stage == "final"]
    assert stages[len(stages) - len(finals) :] == ["final"] * len(finals)
    assert len(finals) in (0, 10, 15)
    medians = {one: sorted(cost for point, cost in finals if point == one)[2] for one, _ in finals}
    assert {first, defaults, winner.point} <= (medians.keys() or {first})
    assert not medians or winner.cost == medians[winner.point] <= min(medians[first], medians[defaults])
    assert not medians or winner.first_cost == medians[first]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_on_a_flat_surface_the_first_point_stays(noise: float) -> None:
    counts, first = [8, 8, 3, 8, 8, 6, 1, 2], (3, 3, 1, 3, 3, 3, 0, 0)
    ends = [
        run(counts, first, first, noisy(lambda _: 1.0, seed, noise), most=SEARCH_MAX)[0].point for seed in range(50)
    ]
    assert ends.count(first) >= (50 if noise < 0.01 else 20)


@pytest.mark.parametrize("cost", [0.0, -1.0, math.nan, math.inf])
def test_costs_that_are_none_count_as_endless(cost: float) -> None:
    first, defaults = (1,) * 8, (2,) * 8
    end, _ = run([3] * 8, first, first, lambda point: 1.0 if point == first else cost, most=SEARCH_MAX)
    assert end.point == first
    end, _ = run([3] * 8, first, defaults, lambda point: cost if point == first else 1.0, most=SEARCH_MAX)
    assert end.point == defaults


class Steps:
    """A program that calls the meter at the end of each step, with a clock of its own."""

    def __init__(self, steps: int) -> None:
        self.meter = Meter(steps)
        self.now_s = 1000.0
        self.samples: list[float] = []

    def step(self, took_s: float, optimizer: int = 1) -> None:
        self.now_s += took_s
        if self.meter.is_measured(optimizer) and (sample := self.meter.note(self.now_s)) is not None:
            self.samples.append(sample)


def test_a_sample_is_the_median_of_whole_steps_of_the_first_optimizer_without_those_of_a_change() -> None:
    program = Steps(10)
    for step in range(33):
        program.step(0.06 if step % 4 else 3000.0)  # a validation, a checkpoint
    assert program.samples == pytest.approx([0.06] * 3)
    program = Steps(2)
    for took_s in (0.06, 0.06, 0.06):
        program.step(took_s)
    program.meter.restart()
    for took_s in (999.0, 999.0, 0.03, 0.03):
        program.step(took_s)
    assert program.samples == pytest.approx([0.03])
    program = Steps(10)
    for _ in range(12):
        program.step(0.06)
        for _ in range(5):  # a discriminator
            program.step(0.01, 2)
    assert program.samples == pytest.approx([0.11])
    for _ in range(110):  # and its fine-tuning
        program.step(0.02, 3)
    assert program.samples == pytest.approx([0.11, 0.02])


class FakeContext:
    """A job that changes over to proposed values a step later; a step takes what the values say."""

    def __init__(self, first: Mapping[str, int]) -> None:
        self.values = {**dict.fromkeys(KNOBS, 1), **first}
        self.coming: dict[str, int] | None = None
        self.is_final = False
        self.proposals: list[tuple[dict[str, int], bool]] = []
        self.bytes = 0

    def tuning(self) -> tuple[dict[str, int], bool]:
        return dict(self.values), self.is_final

    def propose_tuning(self, values: Mapping[str, int], *, is_final: bool = False) -> None:
        assert not self.is_final
        self.proposals.append((dict(values), is_final))
        self.coming, self.is_final = dict(values), is_final

    def counters(self) -> dict[str, int]:
        return {"bytes": self.bytes}

    def step(self, seconds: Callable[[Mapping[str, int]], float]) -> float:
        """The time that a step takes, in which what was proposed is put in force."""
        self.bytes += 3_000_000
        self.values, self.coming = self.coming or self.values, None
        return seconds(self.values)


def tune(plan: Search, first: Mapping[str, int], seconds: Callable[[Mapping[str, int]], float]) -> FakeContext:
    context: Any = FakeContext(first)
    tuner, now_s = Tuner(context, plan), 0.0
    for _ in range(5000):
        now_s += context.step(seconds)
        if tuner.end_step("optimizer", now_s):
            return context  # type: ignore[no-any-return]
    raise AssertionError


def test_a_tuner_ends_at_the_quickest_values_and_writes_each_sample(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    plan = Search({"fusion": 1 << 20}, {"segment": (4096, 1 << 22), "cycle": (128, 1000)}, 2, 3, 60, str(log))

    def seconds(values: Mapping[str, int]) -> float:
        return 0.01 * (1 + abs(math.log2(values["segment"] / 65_536))) + values["cycle"] * 1e-5

    context = tune(plan, {"segment": 4096, "fusion": 0, "cycle": 1000}, seconds)
    expected = {"segment": 65_536, "cycle": 128}
    assert context.proposals[-1][1]
    assert {knob: context.proposals[-1][0][knob] for knob in expected} == expected
    assert not any(is_final for _, is_final in context.proposals[:-1])
    rows = list(csv.DictReader(log.open()))
    assert [row["stage"] for row in rows][:4] == ["warmup", "warmup", "first", "defaults"]
    assert [row["stage"] for row in rows][-2:] == ["final", "best"]
    first = [rows[2][name] for name in ("segment_bytes", "tensor_fusion_threshold", "cycle_time_ms")]
    assert first == ["4096", "0", "1.000"]
    assert rows[3]["tensor_fusion_threshold"] == str(1 << 20)
    assert (rows[-1]["segment_bytes"], rows[-1]["cycle_time_ms"], rows[-1]["overlap"]) == ("65536", "0.128", "never")
    assert float(rows[2]["score"]) == pytest.approx(3e6 / 0.06 / 1e6, rel=1e-4)  # bytes in a microsecond
    assert float(rows[-1]["score"]) == pytest.approx(3e6 / 0.01128 / 1e6, rel=1e-4)
    changed = {knob for values, _ in context.proposals for knob in values if values[knob] != 1}
    assert changed == {"segment", "fusion", "cycle"}


def test_the_log_stays_in_the_folder_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def seconds(_: Mapping[str, int]) -> float:
        monkeypatch.chdir(tmp_path / "elsewhere")
        return 0.1

    tune(Search({}, {}, 1, 2, 10, "log.csv"), {}, seconds)
    assert [path.name for path in tmp_path.rglob("*.csv")] == ["log.csv"]
    assert (tmp_path / "log.csv").stat().st_size > 0


def test_values_that_change_nothing_are_not_proposed_until_the_end() -> None:
    context = tune(Search({}, {}, 3, 2, 10), {}, lambda _: 0.1)
    assert context.proposals == [(context.values, True)]


SEARCH = {
    "HORO_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "20", "HORO_OVERLAP": "always",
}  # fmt: skip


def train(steps: int, watch: Callable[[], Any] = hvd.config) -> tuple[list[torch.Tensor], list[Any], bool]:
    """After each step the parameters, before it what ``watch`` finds; and whether the search is over."""
    model, optimizer = made()
    after, seen = [], []
    for step in range(steps):
        seen.append(watch())
        optimizer.zero_grad()
        take_step(model, optimizer, step % 7)
        after.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    return after, seen, runtime.current().job.context.tuning()[1]


def test_a_job_searches_once_optimizers_step_and_again_when_it_begins_again(tmp_path: Path) -> None:
    log = tmp_path / "autotune.csv"

    def twice() -> list[bool]:
        context = runtime.current().job.context
        first = context.tuning()
        for _ in range(60):
            hvd.allreduce(torch.ones(20_000), name="no step")
        assert context.tuning() == first
        over = [train(400)[2]]
        hvd.shutdown()
        hvd.init()
        assert not runtime.current().job.context.tuning()[1]
        over.append(train(400)[2])
        return over

    with RankPool(2, environment={**SEARCH, "HORO_AUTOTUNE_LOG": str(log)}) as pool:
        assert pool.run(twice) == [[True, True]] * 2
    assert [row["stage"] for row in csv.DictReader(log.open())].count("best") == 1


def test_all_ranks_search_alike_and_config_shows_what_is_in_force(tmp_path: Path) -> None:
    log = tmp_path / "autotune.csv"

    def watch() -> tuple[list[tuple[Any, str]], list[Any]]:
        settings, knobs = hvd.config(), runtime.current().job.context.tuning()[0]
        shown = [(settings[name], settings.source(name)) for name in ("segment_bytes", "overlap", "spin_us")]
        return shown, [knobs["segment"], knobs["overlap"]]

    def search() -> tuple[list[torch.Tensor], list[Any], bool]:
        told = train(400, watch)
        hvd.init(segment_bytes=256 << 10)  # as it was set: no change
        return told

    with RankPool(2, environment={**SEARCH, "HOROVOD_AUTOTUNE_LOG": str(log)}) as pool:
        (first, *one), (second, *other) = pool.run(search)
    assert all(torch.equal(*each) for each in zip(first, second, strict=True))
    for seen, is_over in (one, other):
        assert is_over
        assert seen[0][0] == [(256 << 10, "default"), ("always", "HORO_OVERLAP"), (1000, "default")]
        for (segment, overlap, spin), (native_segment, native_overlap) in seen:
            is_first = native_segment == 256 << 10
            assert segment == (native_segment, "default" if is_first else "autotune")
            assert overlap == (("always", "HORO_OVERLAP") if native_overlap == 2 else ("never", "autotune"))
            assert spin == (1000, "default")
        assert {segment[1] for (segment, _, _), _ in seen} == {"default", "autotune"}
        assert {overlap[1] for (_, overlap, _), _ in seen} == {"HORO_OVERLAP", "autotune"}
    rows = list(csv.DictReader(log.open()))
    assert rows[-1]["stage"] == "best"
    assert {row["overlap"] for row in rows} == {"always", "never"}


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "autotune.csv"
    pool = RankPool(2, environment={**SEARCH, "HORO_AUTOTUNE_LOG": str(path)})
    with pytest.raises(RankError, match=r"HORO_AUTOTUNE_LOG='.*' cannot be written on rank 0: No such file"):
        pool.run(train, 1)
