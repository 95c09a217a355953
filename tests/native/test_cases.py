"""The choice of cases for runs under a sanitizer."""

from __future__ import annotations

import itertools

import pytest
from cases import same_layout, spread


@pytest.mark.parametrize("sizes", [(3, 4), (2, 3, 7), (40,), (5, 1, 5)], ids=str)
@pytest.mark.parametrize("most", [1, 6, 12, 1000])
def test_every_value_of_every_parameter_occurs(sizes: tuple[int, ...], most: int) -> None:
    combinations = list(itertools.product(*map(range, sizes)))
    cases = [(f"test[{values}]", {f"p{i}": value for i, value in enumerate(values)}) for values in combinations]
    chosen = spread(cases, most)
    taken = [values for name, values in cases if name in chosen]
    for i, size in enumerate(sizes):
        assert {values[f"p{i}"] for values in taken} == set(range(size))
    assert len(chosen) >= min(most, len(cases))
    assert len(chosen) <= max(most, sum(sizes))
    assert chosen == spread(cases[::-1], most), "the order of the cases makes no difference"


@pytest.mark.parametrize("sizes", [(3, 4), (2, 3, 7), (5, 1, 5)], ids=str)
def test_of_a_full_product_no_more_cases_are_taken_than_the_longest_list_has_values(sizes: tuple[int, ...]) -> None:
    combinations = itertools.product(*map(range, sizes))
    cases = [(f"test[{values}]", {f"p{i}": value for i, value in enumerate(values)}) for values in combinations]
    assert len(spread(cases, 1)) == max(sizes)


def test_few_cases_are_all_taken() -> None:
    cases = [(f"test[{i}]", {"p": 0}) for i in range(12)]
    assert spread(cases, 12) == {name for name, _ in cases}


def test_two_runs_take_different_cases() -> None:
    combinations = itertools.product(range(3), range(4), range(5))
    cases = [(f"test[{values}]", {f"p{i}": value for i, value in enumerate(values)}) for values in combinations]
    assert len(spread(cases, 4, "address") | spread(cases, 4, "thread")) > len(spread(cases, 4, "address"))
    assert spread(cases, 4, "thread") == spread(cases[::-1], 4, "thread")


@pytest.mark.parametrize(
    "kind",
    [
        [("hosts", [1]), ("host_of_rank", [0])],
        [("hosts", [2]), ("hosts", (3,)), ("host_of_rank", [0, 0])],
        [("hosts", [1, 1]), ("hosts", [1] * 7), ("host_of_rank", [0, 1, 2])],
        [("hosts", [2, 2]), ("hosts", (3, 3, 3)), ("host_of_rank", [0, 1, 0, 1])],
        [("hosts", [2, 1]), ("hosts", (1, 3, 1)), ("host_of_rank", [0, 1, 0])],
    ],
    ids=str,
)
def test_layouts_are_alike_within_their_kind_and_unlike_others(kind: list[tuple[str, object]]) -> None:
    (found,) = {same_layout(name, value) for name, value in kind}
    others = [[1], [2], [1, 1], [2, 2], [2, 1]]
    assert sum(same_layout("hosts", other) == found for other in others) == 1


@pytest.mark.parametrize(("name", "value"), [("hosts", 3), ("hosts", [[1, 1], [2]]), ("hosts", []), ("count", [1, 2])])
def test_what_is_no_layout_is_like_nothing_else(name: str, value: object) -> None:
    assert same_layout(name, value) is None
