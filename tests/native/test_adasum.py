"""Adasum: what all ranks get, against a float64 reference and the properties that its paper promises."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from adasum_oracle import adasum, tolerance
from ranks import Rank, on_ranks, over_every_layout

from horo.core import context

DIGITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 52}
COUNTS = [0, 1, 2, 7, 64, 1001, 30_011]
OP = context.REDUCE_OPS["adasum"]


def values_of(rank: int, count: int, dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    """A part that all ranks have in common, and one of each."""
    common = np.random.default_rng([seed, count]).standard_normal(count)
    return (common + np.random.default_rng([seed, count, rank + 1]).standard_normal(count)).astype(dtype)


def combined(rank: Rank, array: np.ndarray, name: str = "x", **options: Any) -> np.ndarray:
    """Out of place."""
    result, before = np.full_like(array, 77), array.copy()
    rank.finish(rank.submit("allreduce", name, [array], outputs=[result], reduce_op=OP, **options))
    assert array.tobytes() == before.tobytes()
    return result


def check(result: np.ndarray, inputs: Sequence[np.ndarray], dtype: str) -> None:
    allowed = tolerance(inputs, DIGITS[dtype])
    assert np.abs(result.astype(np.float64) - adasum(inputs)).max(initial=0) <= allowed


DTYPES = ["float32", "float64", "float16"]


@over_every_layout
@pytest.mark.parametrize(("dtype", "segment_bytes"), [*itertools.product(DTYPES, [1 << 12, 1 << 18])])
@on_ranks("host_of_rank", "segment_bytes")
def test_any_count_over_any_layout(rank: Rank, dtype: str) -> None:
    """Each alone, out of place and in it, and all as one group; vectors without a common direction are just added."""
    inputs = [[values_of(r, count, dtype) for r in range(rank.size)] for count in COUNTS]
    group = [of_all[rank.rank].copy() for of_all in inputs]
    for of_all, count in zip(inputs, COUNTS, strict=True):
        result = combined(rank, of_all[rank.rank], str(count))
        check(result, of_all, dtype)
        assert rank.is_common(count, result.tobytes())
        again = of_all[rank.rank].copy()
        rank.allreduce(again, f"{count} in place", "adasum")
        assert again.tobytes() == result.tobytes()
    mixed = np.full(9, 2.0)  # of another dtype than most
    rank.finish(rank.submit("allreduce", "group", [*group, mixed], reduce_op=OP))
    for result, of_all in zip(group, inputs, strict=True):
        check(result, of_all, dtype)
    assert (mixed == 2).all()
    assert (combined(rank, np.full(3000, 60000, dtype)) == 60000).all()  # its square is beyond float16
    apart = np.zeros(5000, dtype)
    apart[rank.rank :: rank.size] = 1.5
    assert (combined(rank, apart, "apart") == 1.5).all()


@on_ranks([2], [3], [4], [2, 1], [2, 2])
def test_zero_vectors_change_nothing_and_what_is_not_finite_spreads(rank: Rank) -> None:
    mine = values_of(0, 500)
    for holder in range(rank.size):
        array = mine if rank.rank == holder else np.zeros(500)
        assert np.array_equal(combined(rank, array, f"one{holder}"), mine)
    assert not combined(rank, np.zeros(500), "all").any()
    tiny = np.full(500, 1e-160)  # its square is no normal number: it counts as zero, and is added
    array = tiny if rank.rank == 0 else mine * (rank.rank == 1)
    assert np.array_equal(combined(rank, array, "tiny"), mine + tiny)
    for bad in (np.inf, -np.inf, np.nan):  # it spreads over its tensor only
        poisoned, clean = values_of(rank.rank, 2000), values_of(rank.rank, 2000, seed=1)
        if rank.rank == rank.size - 1:
            poisoned[1234] = bad
        rank.finish(rank.submit("allreduce", f"{bad}", [poisoned, clean], reduce_op=OP))
        assert np.isnan(poisoned).all()
        check(clean, [values_of(r, 2000, seed=1) for r in range(rank.size)], "float64")


@on_ranks(host_of_rank=[0, 1, 2, 0, 1, 2, 0])
def test_teams_combine_in_the_order_of_their_members(rank: Rank) -> None:
    for members in ([0, 1, 2, 4, 6], [1, 2, 5], [0, 3, 6]):
        team = rank.add_team(members)
        for count in (3, 5000) if rank.rank in members else ():
            inputs = [values_of(member, count) for member in members]
            check(combined(rank, inputs[members.index(rank.rank)], team=team), inputs, "float64")
