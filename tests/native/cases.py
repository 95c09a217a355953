"""Which cases of a parametrized test a run under a sanitizer takes, which is ten times as slow."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

__all__ = ["CASES_UNDER_A_SANITIZER", "spread"]

CASES_UNDER_A_SANITIZER = 4
"""Of one test. What more of them would find is wrong numbers, which the run without a sanitizer looks for."""


def spread(cases: Sequence[tuple[str, Mapping[str, int]]], most: int, of: str = "") -> set[str]:
    """Names of at most so many cases of one test; of more where some value of a parameter would not occur otherwise.

    The same ones each time: drawn by the hash of their names, and by what they are drawn for.

    Args:
        cases: The name of each case, and for each parameter which of its values the case has.
        most: How many.
        of: Which run they are for; another one gets other cases.
    """
    if len(cases) <= most:
        return {name for name, _ in cases}
    drawn = sorted(cases, key=lambda case: zlib.crc32(f"{of}{case[0]}".encode()))
    seen: set[tuple[str, int]] = set()
    chosen = []
    for name, values in drawn:
        if not seen.issuperset(values.items()):
            seen |= set(values.items())
            chosen.append(name)
    rest = [name for name, _ in drawn if name not in chosen]
    return {*chosen, *rest[: max(0, most - len(chosen))]}
