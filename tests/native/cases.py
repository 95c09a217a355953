"""Which cases of a parametrized test a run takes; under a sanitizer, which is ten times as slow, fewer."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence

__all__ = ["CASES_UNDER_A_SANITIZER", "SEEDS_UNDER_A_SANITIZER", "alike", "pairs", "same_layout", "spread"]

Case = tuple[str, Mapping[str, Hashable]]
"""Its name, and for each parameter which of its values it has."""

CASES_UNDER_A_SANITIZER = 2
"""Of one test, or as many as its values need. What more of them would find is wrong numbers, which the run without a
sanitizer looks for; and the two sanitizers take different ones."""

SEEDS_UNDER_A_SANITIZER = 4
"""Of a test of random schedules, which are what races are found by."""


def alike(of: str) -> set[str]:
    """Parameters of which a run for ``address`` or ``thread`` takes any value for as good as another: the seeds; and
    where only races are looked for, lengths around a bound.
    """
    return {"seed"} | ({"edge", "extra"} if of == "thread" else set())


def same_layout(name: str, value: object) -> Hashable:
    """What a sanitizer's run takes layouts of ranks over hosts to be alike by; None: it is no layout.

    Whether there are other hosts, whether ranks share one, and whether hosts have as many: what more hosts or more
    ranks would find is wrong numbers.
    """
    if name not in {"hosts", "host_of_rank"} or not isinstance(value, list | tuple):
        return None
    counts = list(value) if name == "hosts" else [value.count(host) for host in set(value)]
    if not counts or not all(isinstance(count, int) for count in counts):
        return None
    return len(counts) > 1, max(counts) > 1, len(set(counts)) > 1


def spread(cases: Sequence[Case], most: int, of: str = "") -> set[str]:
    """Names of at most so many cases of one test; of more where some value of a parameter would not occur otherwise.

    Args:
        cases: All of one test.
        most: How many.
        of: Which run they are for; another one gets other cases.
    """
    if len(cases) <= most:
        return {name for name, _ in cases}
    drawn = _drawn(cases, of)
    chosen = _cover(drawn, lambda values: set(values.items()))
    rest = [name for name, _ in drawn if name not in chosen]
    return {*chosen, *rest[: max(0, most - len(chosen))]}


def pairs(cases: Sequence[Case]) -> set[str]:
    """Names of few cases of one test among which are all pairs of values of two parameters that occur in any case.

    Of a test with one parameter or two those are all.
    """
    if any(len(values) < 3 for _, values in cases):
        return {name for name, _ in cases}
    return set(_cover(_drawn(cases, ""), lambda values: set(itertools.combinations(sorted(values.items()), 2))))


def _drawn(cases: Sequence[Case], of: str) -> list[Case]:
    """The same order each time, whatever the one of the cases is."""
    return sorted(cases, key=lambda case: zlib.crc32(f"{of}{case[0]}".encode()))


def _cover(drawn: Sequence[Case], parts: Callable[[Mapping[str, Hashable]], set[Hashable]]) -> list[str]:
    """Names of cases that have all parts of all: those first that have most which no other has."""
    of_case = {name: parts(values) for name, values in drawn}
    unseen = set().union(*of_case.values())
    chosen: list[str] = []
    while unseen:
        name = max(of_case, key=lambda name: len(unseen & of_case[name]))  # the first drawn of the best
        unseen -= of_case[name]
        chosen.append(name)
    return chosen
