"""The choice of cases of a test that has many, and what makes skipped tests run."""

from __future__ import annotations

import itertools

import pytest
from cases import CASES, pairwise, same_layout, some_of, spread
from skips import ways_to_run


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


def test_two_runs_take_different_cases() -> None:
    traits = _traits(_product(3, 4, 5))
    assert len(spread(traits, 4, "address") | spread(traits, 4, "thread")) > len(spread(traits, 4, "address"))


def test_every_pair_of_values_of_any_two_parameters_occurs() -> None:
    cases = _product(3, 4, 5)
    taken = [params for name, params in cases if name in pairwise(cases)]
    for a, b in itertools.combinations(("p0", "p1", "p2"), 2):
        assert {(params[a], params[b]) for params in taken} == {(params[a], params[b]) for _, params in cases}
    assert len(taken) < len(cases) / 2


@pytest.mark.parametrize("cases", [_product(100), _product(3, 4), _product(4, 5)[1:]], ids=len)
def test_few_cases_and_those_of_one_list_or_of_no_product_are_all_taken(
    cases: list[tuple[str, dict[str, int]]],
) -> None:
    assert pairwise(cases) == {name for name, _ in cases}


def test_of_two_lists_every_value_occurs() -> None:
    cases = _product(6, 7)
    assert len(pairwise(cases)) == CASES
    taken = [params for name, params in cases if name in pairwise(cases)]
    assert [len({params[p] for params in taken}) for p in ("p0", "p1")] == [6, 7]


def test_a_sanitizer_takes_two_cases_and_four_seeds() -> None:
    assert len(some_of(_product(2, 2), "address")) == 2
    assert len(some_of([(f"test[{seed}]", {"seed": seed}) for seed in range(9)], "thread")) == 4


ALIKE = [
    [("hosts", [1]), ("host_of_rank", [0])],
    [("hosts", [2]), ("hosts", (3,)), ("host_of_rank", [0, 0])],
    [("hosts", [1, 1]), ("hosts", [1] * 7), ("host_of_rank", [0, 1, 2])],
    [("hosts", [2, 1]), ("hosts", (1, 3, 1)), ("host_of_rank", [0, 1, 0])],
]


@pytest.mark.parametrize("kind", ALIKE, ids=str)
def test_layouts_are_alike_within_their_kind_and_unlike_others(kind: list[tuple[str, object]]) -> None:
    (found,) = {same_layout(name, value) for name, value in kind}
    others = [[1], [2], [1, 1], [2, 2], [2, 1]]
    assert sum(same_layout("hosts", other) == found for other in others) == 1


REASONS = [
    *["no cluster: ip, sshd are not installed (`apt install iproute2 openssh-server`)"] * 3,
    "no Slurm: srun is not installed (`apt install slurm-client`)",
    *["no openmpi: build/mpi/openmpi is not there (`make test-mpi` makes it)"] * 6,
    "need --with-mpi option to run",
    "making network namespaces needs root",
    "this machine has no avx512",
]


def test_each_way_is_one_line_with_the_number_of_its_tests() -> None:
    assert ways_to_run(REASONS) == [
        "    7 tests: make test-mpi",
        "    4 tests: apt install iproute2 openssh-server slurm-client",
        "    1 test:  as root, on a machine or in a container that may make network namespaces",
        "    1 test:  not on this machine, or not in this kind of run: the reasons are above",
    ]
