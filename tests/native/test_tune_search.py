"""The autotuner's search by itself, on surfaces whose best point is known, with noise and without."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

KNOBS = 8
Point = tuple[int, ...]
STAGES = ("warmup", "first", "defaults", "try", "check", "final", "best")
SEARCH_MAX = 40


class Search:
    """``hr_search`` with plain arguments."""

    def __init__(
        self, native: ModuleType, counts: Sequence[int], first: Point, defaults: Point, *, warmup: int = 0, most: int
    ) -> None:
        self._lib, self._ffi = native.lib, native.ffi
        self._self = self._ffi.gc(
            self._lib.shim_search_create(list(counts), list(first), list(defaults), warmup, most),
            self._lib.shim_search_destroy,
        )

    @property
    def where(self) -> tuple[str, Point]:
        point = self._ffi.new("int[]", KNOBS)
        stage = self._ffi.string(self._lib.shim_search_point(self._self, point)).decode()
        return stage, tuple(point)

    def note(self, cost: float) -> None:
        self._lib.shim_search_note(self._self, cost)

    @property
    def measured(self) -> int:
        return int(self._lib.shim_search_measured(self._self))


def run(search: Search, cost: Callable[[Point], float]) -> tuple[Point, list[tuple[str, Point]]]:
    """The winner, and all that was measured."""
    seen = []
    while search.where[0] != "best":
        seen.append(search.where)
        search.note(cost(search.where[1]))
        assert len(seen) < 1000
    return search.where[1], seen


def bowl(best: Point, steepness: float = 0.2) -> Callable[[Point], float]:
    """Costs 1 at the best point, and more by a factor for each step away from it."""
    return lambda point: math.prod(1 + steepness * abs(a - b) for a, b in zip(point, best, strict=True))


def noisy(cost: Callable[[Point], float], seed: int, noise: float) -> Callable[[Point], float]:
    chance = random.Random(seed)
    return lambda point: cost(point) * math.exp(chance.gauss(0, noise))


points = st.lists(st.integers(1, 12), min_size=KNOBS, max_size=KNOBS).flatmap(
    lambda counts: st.tuples(
        st.just(counts),
        *[st.tuples(*(st.integers(0, count - 1) for count in counts)) for _ in range(3)],
    )
)


@given(points)
@settings(max_examples=300, deadline=None)
def test_without_noise_it_finds_the_bottom_of_a_bowl(
    native: ModuleType, case: tuple[list[int], Point, Point, Point]
) -> None:
    counts, first, defaults, best = case
    search = Search(native, counts, first, defaults, most=10_000)
    winner, _ = run(search, bowl(best))
    assert winner == best


@given(points, st.integers(1, SEARCH_MAX), st.integers(0, 5), st.tuples(st.integers(0, 2**32), st.floats(0, 3)))
@settings(max_examples=500, deadline=None)
def test_every_point_is_in_its_range_and_the_number_of_points_is_bounded(
    native: ModuleType, case: tuple[list[int], Point, Point, Point], most: int, warmup: int, chance: tuple[int, float]
) -> None:
    (counts, first, defaults, best), (seed, noise) = case, chance
    search = Search(native, counts, first, defaults, warmup=warmup, most=most)
    winner, seen = run(search, noisy(bowl(best), seed, noise))
    assert all(
        0 <= index < count for _, point in [*seen, ("", winner)] for index, count in zip(point, counts, strict=True)
    )
    order = [STAGES.index(stage) for stage, _ in seen]
    assert [stage for stage, _ in seen].count("warmup") == warmup
    assert search.measured <= max(most, 2) + 1  # a check is not left out
    assert all(point == first for stage, point in seen if stage in ("warmup", "first"))
    finals = [point for stage, point in seen if stage == "final"]
    assert order[len(order) - len(finals) :] == [STAGES.index("final")] * len(finals)
    assert len(finals) in (0, 10, 15)
    assert winner in (set(finals) or {first})
    assert {first, defaults} <= (set(finals) or {first})


@given(points, st.integers(0, 2**32), st.floats(0, 0.5))
@settings(max_examples=300, deadline=None)
def test_it_ends_no_slower_than_it_began_or_than_the_defaults(
    native: ModuleType, case: tuple[list[int], Point, Point, Point], seed: int, noise: float
) -> None:
    """By what it measured in the end, point against point."""
    counts, first, defaults, best = case
    search = Search(native, counts, first, defaults, most=SEARCH_MAX)
    costs: dict[Point, list[float]] = {}
    cost = noisy(bowl(best), seed, noise)
    while (where := search.where)[0] != "best":
        measured = cost(where[1])
        if where[0] == "final":
            costs.setdefault(where[1], []).append(measured)
        search.note(measured)
    medians = {point: sorted(values)[2] for point, values in costs.items()}
    winner = search.where[1]
    assert not medians or medians[winner] <= min(medians[first], medians[defaults])


def test_five_percent_of_noise_do_not_lead_it_astray(native: ModuleType) -> None:
    """Of a hundred searches on a bowl, all end better than they began, nearly all near the best point."""
    counts, first = [11, 11, 3, 13, 11, 6, 1, 2], (0, 0, 0, 2, 0, 0, 0, 0)
    best = (7, 5, 1, 9, 6, 5, 0, 1)
    cost = bowl(best, 0.3)
    ends = []
    for seed in range(100):
        search = Search(native, counts, first, first, most=SEARCH_MAX)
        winner, _ = run(search, noisy(cost, seed, 0.05))
        ends.append(cost(winner))
    assert max(ends) < cost(first)
    assert sorted(ends)[90] < 4, (cost(first), sorted(ends))


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_on_a_flat_surface_the_first_point_stays(native: ModuleType, noise: float) -> None:
    stayed = 0
    first = (3, 3, 1, 3, 3, 3, 0, 0)
    for seed in range(50):
        search = Search(native, [8, 8, 3, 8, 8, 6, 1, 2], first, first, most=SEARCH_MAX)
        stayed += run(search, noisy(lambda _: 1.0, seed, noise))[0] == first
    assert stayed >= (50 if noise < 0.01 else 20)


@pytest.mark.parametrize("cost", [0.0, -1.0, math.nan, math.inf])
def test_costs_that_are_none_count_as_endless(native: ModuleType, cost: float) -> None:
    first = (1,) * KNOBS
    search = Search(native, [3] * KNOBS, first, first, most=SEARCH_MAX)
    assert run(search, lambda point: 1.0 if point == first else cost)[0] == first


def test_a_first_point_that_costs_endlessly_is_left(native: ModuleType) -> None:
    first, defaults = (0,) * KNOBS, (1,) * KNOBS
    search = Search(native, [3] * KNOBS, first, defaults, most=SEARCH_MAX)
    assert run(search, lambda point: math.inf if point == first else 1.0)[0] == defaults
