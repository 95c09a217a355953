"""The choice of cases of a test that has many."""

import itertools

import pytest
from cases import CASES, SEEDS, pairwise, some_of, spread


def _product(*sizes: int) -> list[tuple[str, dict[str, int]]]:
    combinations = itertools.product(*map(range, sizes))
    return [(f"test[{values}]", {f"p{i}": value for i, value in enumerate(values)}) for values in combinations]


def _traits(cases: list[tuple[str, dict[str, int]]]) -> list[tuple[str, set[object]]]:
    return [(name, set(params.items())) for name, params in cases]


@pytest.mark.parametrize("sizes", [(3, 4), (2, 3, 7), (40,)], ids=str)
@pytest.mark.parametrize("most", [1, 1000])
def test_every_value_of_every_parameter_occurs(sizes: tuple[int, ...], most: int) -> None:
    cases = _product(*sizes)
    chosen = spread(_traits(cases), most)
    taken = [params for name, params in cases if name in chosen]
    for i, size in enumerate(sizes):
        assert {params[f"p{i}"] for params in taken} == set(range(size))
    assert min(most, len(cases)) <= len(chosen) <= max(most, sum(sizes))
    assert chosen == spread(_traits(cases[::-1]), most), "the order of the cases makes no difference"


def test_every_pair_of_values_of_any_two_parameters_occurs() -> None:
    cases = _product(3, 4, 5)
    taken = [params for name, params in cases if name in pairwise(cases)]
    for a, b in itertools.combinations(("p0", "p1", "p2"), 2):
        assert {(params[a], params[b]) for params in taken} == {(params[a], params[b]) for _, params in cases}
    assert len(taken) < len(cases) / 2


@pytest.mark.parametrize("cases", [_product(100), _product(2, 3), _product(4, 5)[1:]], ids=len)
def test_few_cases_and_those_of_one_list_or_no_product_are_all_taken(
    cases: list[tuple[str, dict[str, int]]],
) -> None:
    assert pairwise(cases) == {name for name, _ in cases}


def test_parameters_in_a_row_count_as_one() -> None:
    rows = [(object(), object()) for _ in range(9)]
    cases: list[tuple[str, dict[str, object]]] = [
        (f"{i} {a} {b}", {"one": one, "a": a, "b": b, "other": other})
        for i, (one, other) in enumerate(rows)
        for a in range(3)
        for b in range(3)
    ]
    assert len(some_of(cases)) == len(cases)
    chosen = some_of(cases, rows=[("a",), ("one", "other")])
    assert CASES < len(chosen) < len(cases) / 2
    assert {name[:-2] for name in chosen} == {name[:-2] for name, _ in cases}


def test_of_random_schedules_alone_some_are_taken() -> None:
    assert len(some_of([(f"test[{seed}]", {"seed": seed}) for seed in range(9)])) == SEEDS
