"""Which cases of a test that has many a run takes; `HORO_ALL_CASES=1` takes all."""

import math
import zlib
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

CASES = 6
"""A test with no more cases than these runs whole."""

SEEDS = 4
"""Of a test of random schedules alone; what more would find is left to `make test-all` and `make stress`."""

CASES_UNDER_A_SANITIZER = 2
"""A sanitizer makes a test ten times as slow. What more cases would find is wrong numbers, which the run without a
sanitizer looks for; and the two sanitizers take different ones."""


def some_of(
    cases: Sequence[tuple[str, Mapping[str, object]]], sanitizer: str = "", rows: Sequence[Sequence[str]] = ()
) -> set[str]:
    """Names of the cases of one test that a run takes; ``sanitizer``: ``address``, ``thread`` or empty.

    ``cases``: the name and the parameters of each. Values are equal if they are the same object. ``rows``: the names
    of parameters that have one list of rows together, which count as one parameter.
    """
    if not sanitizer and set(cases[0][1]) == {"seed"}:
        return spread([(name, set()) for name, _ in cases], SEEDS)
    if not sanitizer:
        return pairwise([(name, by_row(params, rows)) for name, params in cases])
    values = [(name, {n: same_layout(n, v) or id(v) for n, v in p.items() if n != "seed"}) for name, p in cases]
    most = SEEDS if "seed" in cases[0][1] else CASES_UNDER_A_SANITIZER
    return spread([(name, set(each.items())) for name, each in values], most, sanitizer)


def by_row(params: Mapping[str, object], rows: Sequence[Sequence[str]]) -> dict[str, Hashable]:
    """The values of a case; of parameters in a row, all under the name of the first one."""
    row_of = {name: row[0] for row in rows for name in row}
    found: dict[str, list[int]] = {}
    for name in sorted(params):
        found.setdefault(row_of.get(name, name), []).append(id(params[name]))
    return {name: tuple(values) for name, values in found.items()}


def pairwise(cases: Sequence[tuple[str, Mapping[str, Hashable]]]) -> set[str]:
    """Names of cases that have every pair of values of any two parameters; of two parameters, every value of each.

    All cases if they are few, or no product of lists of values.
    """
    values = [{params[name] for _, params in cases} for name in cases[0][1]]
    if len(values) == 1 or len(cases) != math.prod(map(len, values)):
        return {name for name, _ in cases}
    together = min(2, len(values) - 1)
    return spread([(name, set(combinations(params.items(), together))) for name, params in cases], CASES)


def same_layout(name: str, value: object) -> Hashable:
    """What a sanitizer takes layouts to be alike by: other hosts? shared ones? as many ranks on each?

    What more hosts or more ranks would find is wrong numbers. None: it is no layout.
    """
    if name not in {"hosts", "host_of_rank"} or not isinstance(value, list | tuple):
        return None
    counts = list(value) if name == "hosts" else [value.count(host) for host in set(value)]
    if not counts or not all(isinstance(count, int) for count in counts):
        return None
    return len(counts) > 1, max(counts) > 1, len(set(counts)) > 1


def spread(cases: Sequence[tuple[str, set[Hashable]]], most: int, of: str = "") -> set[str]:
    """Names of at most so many cases of one test; of more if some trait would not occur otherwise.

    The same ones each time: those first that have most traits which no other has; among equals drawn by the hash of
    their names, and by what they are drawn for.
    """
    if len(cases) <= most:
        return {name for name, _ in cases}
    drawn = sorted(cases, key=lambda case: zlib.crc32(f"{of}{case[0]}".encode()))
    unseen = set[Hashable]().union(*(traits for _, traits in cases))
    chosen: list[str] = []
    while unseen:
        name, traits = max(drawn, key=lambda case: len(unseen & case[1]))  # the first drawn of the best
        unseen -= traits
        chosen.append(name)
    rest = [name for name, _ in drawn if name not in chosen]
    return {*chosen, *rest[: max(0, most - len(chosen))]}
