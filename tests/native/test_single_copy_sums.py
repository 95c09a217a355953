"""Reduce-scatters on one host that read the other ranks' memory: the numbers are those of an allreduce, to the bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from ranks import NUMPY_OF_DTYPE, Rank, recorded_stderr, run_ranks
from test_reducescatter import rows_of, scatter
from test_single_copy import INFO, READS

CASES = list(itertools.product(sorted(NUMPY_OF_DTYPE), ["sum", "min", "max", "product", "average"]))


def numbers(dtype: str, rows: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    kind = np.dtype(NUMPY_OF_DTYPE[dtype])
    if kind.kind == "f":
        return (rng.standard_normal((rows, 3)) * 10.0 ** rng.integers(-3, 4, (rows, 3))).astype(kind)
    return rng.integers(0, 2 if kind == np.bool_ else 100, (rows, 3)).astype(kind)


@pytest.mark.parametrize("hosts", [[2], [3], [5]], ids=str)
@pytest.mark.parametrize(("dtype", "op"), [case for case in CASES if case != ("bool", "average")])
def test_the_bits_are_those_of_an_allreduce(hosts: list[int], dtype: str, op: str) -> None:
    def body(rank: Rank) -> None:
        for rows in (1, rank.size, 1000, 20_001):
            values = numbers(dtype, rows, rank.rank)
            factors = {"postscale": 0.7} if op == "average" and values.dtype.kind == "f" else {}
            whole = rank.allreduce(values.copy(), f"a{rows}", op, **factors)
            (got,) = scatter(rank, [values], f"s{rows}", op, **factors)
            assert got.tobytes() == whole[rows_of(rows, rank.size, rank.rank)].tobytes()

    with recorded_stderr() as said:
        run_ranks(body, hosts, segment_bytes=1 << 15, direct_bytes=1, log_level=INFO)
        assert said().count(READS) == 1


@pytest.mark.parametrize(("size", "segment_bytes"), [(2, 1 << 12), (3, 1 << 12), (9, 1 << 15), (17, 1 << 15)])
def test_slots_without_room_for_what_is_read_at_once(size: int, segment_bytes: int) -> None:
    def body(rank: Rank) -> None:
        for turn in range(2):
            for rows in (10, 3000):
                (got,) = scatter(rank, [np.arange(rows) * (rank.rank + turn)], str(rows))
                factor = size * (size - 1) // 2 + size * turn
                assert np.array_equal(got, np.arange(rows)[rows_of(rows, size, rank.rank)] * factor)

    run_ranks(body, [size], segment_bytes=segment_bytes, direct_bytes=1, spin_us=0)
