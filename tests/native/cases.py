"""Which cases of a parametrized test a run under a sanitizer takes, which is ten times as slow."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping, Sequence

__all__ = ["CASES_UNDER_A_SANITIZER", "SEEDS_UNDER_A_SANITIZER", "alike", "same_layout", "spread"]

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


def spread(cases: Sequence[tuple[str, Mapping[str, Hashable]]], most: int, of: str = "") -> set[str]:
    """Names of at most so many cases of one test; of more where some value of a parameter would not occur otherwise.

    The same ones each time: those first that have most values which no other has; among equals drawn by the hash of
    their names, and by what they are drawn for.

    Args:
        cases: The name of each case of one test, and for each parameter which of its values the case has.
        most: How many.
        of: Which run they are for; another one gets other cases.
    """
    if len(cases) <= most:
        return {name for name, _ in cases}
    drawn = sorted(cases, key=lambda case: zlib.crc32(f"{of}{case[0]}".encode()))
    unseen = {value for _, values in cases for value in values.items()}
    chosen: list[str] = []
    while unseen:
        name, values = max(drawn, key=lambda case: len(unseen & case[1].items()))  # the first drawn of the best
        unseen -= values.items()
        chosen.append(name)
    rest = [name for name, _ in drawn if name not in chosen]
    return {*chosen, *rest[: max(0, most - len(chosen))]}
