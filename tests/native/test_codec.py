"""Allreduces whose blocks are no elements: int8 with a scale per block, by the codec of tests/native/shim/int8_codec.h.

What travels this way has no dtype, no fixed ratio of bytes, and a last block per tensor that need not be full; no
request can ask for it, so the ranks here run the algorithms without engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import kernel_oracle as oracle
import numpy as np
import numpy.typing as npt
import pytest
from links import run_ranks

Array = npt.NDArray[np.float32]
BLOCKS = [64, 32, 5, 1000]
"""Values of a block, which takes 4 bytes more: 68, 36, 9 and 1004, none of which a cache line or a slot is made of."""
SMALL, LARGE = 4096, 1 << 18
"""Bytes of a slot: many segments; or a few, of which a share goes round the ring in several pieces."""
REDUCERS = {oracle.SUM: np.add, oracle.MIN: np.minimum, oracle.MAX: np.maximum, oracle.PRODUCT: np.multiply}
DOUBLING_BYTES = 1 << 16  # a larger share goes round the ring

by_block = pytest.mark.parametrize("block", BLOCKS)


class Job:
    """Ranks that run allreduces of lists of tensors."""

    def __init__(self, native: ModuleType, job: Any, size: int) -> None:
        self._native, self._job, self.size = native, job, size

    def allreduce(
        self,
        inputs: Sequence[Sequence[Array]],
        op: int = oracle.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        *,
        in_place: bool = False,
    ) -> list[list[Array]]:
        """What each rank gets, by rank and tensor."""
        ffi, lib = self._native.ffi, self._native.lib

        def body(rank: int) -> list[Array]:
            given = [values.copy() for values in inputs[rank]]
            results = given if in_place else [np.full_like(values, 77) for values in given]
            tensors = ffi.new("shim_codec_tensor[]", len(given))
            for tensor, values, result in zip(tensors, given, results, strict=True):
                tensor.input = ffi.cast("float *", values.ctypes.data)
                tensor.output = ffi.cast("float *", result.ctypes.data)
                tensor.count = len(values)
            assert lib.shim_codec_allreduce(self._job, rank, tensors, len(given), op, prescale, postscale) == 0
            assert in_place or same_bits(given, inputs[rank])
            return results

        return run_ranks(self.size, body)

    def link_bytes(self) -> int:
        """By all ranks."""
        return sum(self._native.lib.shim_codec_link_bytes(self._job, rank) for rank in range(self.size))


@contextmanager
def job_of(native: ModuleType, hosts: Sequence[int], block: int, segment_bytes: int = SMALL) -> Iterator[Job]:
    host_of_rank = [host for host, count in enumerate(hosts) for _ in range(count)]
    job = native.lib.shim_codec_create(host_of_rank, len(host_of_rank), segment_bytes, block)
    assert job != native.ffi.NULL
    try:
        yield Job(native, job, len(host_of_rank))
    finally:
        native.lib.shim_codec_destroy(job)


def values_of(count: int, rank: int, seed: int = 0) -> Array:
    """Of mixed magnitude, so that a block's scale matters."""
    rng = np.random.default_rng([seed, rank, count])
    return (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 3, count)).astype(np.float32)


def wire_bytes(count: int, block: int) -> int:
    return -(-count // block) * (block + 4)


def packed(values: Array, block: int) -> Array:
    """What values are after a way through whole blocks of int8."""
    blocks = np.zeros((-(-len(values) // block), block), np.float32)
    blocks.reshape(-1)[: len(values)] = values
    scales = np.abs(blocks).max(axis=1, keepdims=True, initial=0) / np.float32(127)
    divisors = np.where(scales == 0, np.float32(1), scales)
    levels = np.clip(np.rint(blocks / divisors), -127, 127).astype(np.int8)
    result: Array = (levels.astype(np.float32) * scales).reshape(-1)[: len(values)]
    return result


def reduced(contributions: Sequence[Array], block: int, op: int = oracle.SUM, factor: float = 1.0) -> Array:
    """Contributions as they arrive, in their order in float32, multiplied and packed."""
    total = contributions[0]
    for values in contributions[1:]:
        total = REDUCERS[op](total, values)
    return packed(total * np.float32(factor), block)


def same_bits(results: Sequence[Array], expected: Sequence[Array]) -> bool:
    return all(one.tobytes() == two.tobytes() for one, two in zip(results, expected, strict=True))


def counts_of(block: int) -> list[list[int]]:
    """How many values the tensors of a vector have: around a block, flat data and segments, and ragged inside."""
    in_slot = SMALL // (block + 4) * block
    around = [max(border + step, 0) for border in (block, in_slot, 3 * in_slot) for step in (-1, 0, 1)]
    fused = [7, 0, in_slot + 3, 1, 2 * in_slot - 1, block, 5]
    return [[], [0], [1], *([count] for count in around), fused]


# ---- To the bit ----


@by_block
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("op", REDUCERS)
def test_one_host_packs_contributions_and_result_and_nothing_between(
    native: ModuleType, op: int, ranks: int, block: int
) -> None:
    with job_of(native, [ranks], block) as job:
        for counts in counts_of(block):
            inputs = [[values_of(count, rank, seed) for seed, count in enumerate(counts)] for rank in range(ranks)]
            expected = [
                reduced([packed(values * np.float32(0.3), block) for values in tensors], block, op, -1.7)
                for tensors in zip(*inputs, strict=True)
            ]
            for results in job.allreduce(inputs, op, 0.3, -1.7):
                assert same_bits(results, expected), counts


@by_block
def test_one_rank_gets_what_its_values_are_when_packed(native: ModuleType, block: int) -> None:
    with job_of(native, [1], block) as job:
        for counts in counts_of(block):
            given = [values_of(count, 0, seed) for seed, count in enumerate(counts)]
            (results,) = job.allreduce([given])
            assert same_bits(results, [packed(values, block) for values in given]), counts
            (results,) = job.allreduce([given], prescale=0.3, postscale=-1.7)
            contributions = [packed(values * np.float32(0.3), block) for values in given]
            assert same_bits(results, [reduced([values], block, factor=-1.7) for values in contributions]), counts


@by_block
@pytest.mark.parametrize("segment_bytes", [SMALL, LARGE])
@pytest.mark.parametrize("hosts", [[1, 1], [2, 2], [1, 3]], ids=str)
def test_two_hosts_pack_once_more_where_a_sum_travels(
    native: ModuleType, hosts: list[int], segment_bytes: int, block: int
) -> None:
    counts = [*counts_of(block), [100_001, 50_000, 64]]
    with job_of(native, hosts, block, segment_bytes) as job:
        for some in counts if segment_bytes == SMALL else counts[-2:]:
            inputs = [[values_of(count, rank, seed) for seed, count in enumerate(some)] for rank in range(job.size)]
            expected = []
            for tensors in zip(*inputs, strict=True):
                contributions = [packed(values, block) for values in tensors]
                partial = [reduced(part, block) for part in (contributions[: hosts[0]], contributions[hosts[0] :])]
                expected.append(reduced([reduced(partial, block)], block, factor=0.25))
            for results in job.allreduce(inputs, postscale=0.25):
                assert same_bits(results, expected), some


# ---- Any hosts ----

MANY = [[3], [1, 1, 1], [2, 1, 3], [2, 2, 2], [1] * 5]


@by_block
@pytest.mark.parametrize("segment_bytes", [SMALL, LARGE])
@pytest.mark.parametrize("hosts", MANY, ids=str)
def test_what_int8_holds_is_exact_however_it_travels(
    native: ModuleType, hosts: list[int], segment_bytes: int, block: int
) -> None:
    """Each rank has the same integers, the largest of each block 127, times a power of two of its own."""
    with job_of(native, hosts, block, segment_bytes) as job:
        integers = []
        for count in (1, block + 1, 70_003):
            values = np.random.default_rng(count).integers(-127, 128, count).astype(np.float32)
            values[::block] = 127
            integers.append(values)
        results = job.allreduce([[values * np.float32(2**rank) for values in integers] for rank in range(job.size)])
        total = np.float32(2**job.size - 1)
        assert all(same_bits(of_rank, [values * total for values in integers]) for of_rank in results)


@by_block
@pytest.mark.parametrize("segment_bytes", [SMALL, LARGE])
@pytest.mark.parametrize("hosts", MANY, ids=str)
def test_all_ranks_hold_the_same_bits_near_the_sum(
    native: ModuleType, hosts: list[int], segment_bytes: int, block: int
) -> None:
    counts = [100_001, 50_000, 64]
    with job_of(native, hosts, block, segment_bytes) as job:
        inputs = [[values_of(count, rank, seed) for seed, count in enumerate(counts)] for rank in range(job.size)]
        results = job.allreduce(inputs, in_place=True)
        assert all(same_bits(of_rank, results[0]) for of_rank in results)
    for index, count in enumerate(counts):
        exact = sum(tensors[index].astype(np.float64) for tensors in inputs)
        # Nothing on the way is larger than the sum of the largest values of its block, but by what was lost before;
        # each packing loses half of a level: one per contribution, and one per sum on each host and between them.
        largest = np.zeros(-(-count // block) * block)
        largest[:count] = sum(np.abs(tensors[index]) for tensors in inputs)
        bound = largest.reshape(-1, block).max(axis=1).repeat(block)[:count] * job.size
        assert (np.abs(results[0][index] - exact) <= bound * (2 * job.size + 1) / 254).all()


@by_block
@pytest.mark.parametrize("segment_bytes", [SMALL, LARGE])
@pytest.mark.parametrize("hosts", [[1, 1], [2, 2], [1, 1, 1]], ids=str)
def test_a_link_carries_blocks_and_nothing_else(
    native: ModuleType, hosts: list[int], segment_bytes: int, block: int
) -> None:
    """Two and three hosts exchange as much by doubling as round a ring."""
    counts = [300_001, 3]
    assert SMALL < DOUBLING_BYTES < LARGE // 2
    with job_of(native, hosts, block, segment_bytes) as job:
        job.allreduce([[values_of(count, rank) for count in counts] for rank in range(job.size)])
        assert job.link_bytes() == 2 * (len(hosts) - 1) * sum(wire_bytes(count, block) for count in counts)
