"""Products of complex numbers on GPUs: NCCL has none, so they are staged on all ranks, among what it does."""

from __future__ import annotations

import numpy as np
import pytest
from complex_numbers import factor, product, read, stored
from device_group import SUM, Gpu, Nccl, OnGpu, on_gpu
from ranks import NUMPY_OF_COMPLEX, Rank, on_ranks, run_ranks
from test_reducescatter import rows_of

from horo.core import context

PRODUCT = context.REDUCE_OPS["product"]
LENGTHS = [0, 1, 1000]


@pytest.mark.parametrize("hosts", [(2,), (1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("way", ["staged", "nccl"])
def test_products_are_staged_and_sums_are_not(gpu: Gpu, nccl: Nccl, hosts: tuple[int, ...], way: str) -> None:
    def body(rank: Rank) -> None:
        libraries = None if way == "staged" else [nccl.path]
        own = OnGpu(rank, gpu, libraries, device=rank.rank)
        for dtype in NUMPY_OF_COMPLEX:
            for count in LENGTHS:
                mine = stored(factor(rank.rank, count), dtype)
                got = own.allreduce(mine, f"{dtype} {count}", "product", postscale=0.5)
                assert np.array_equal(read(got), product(range(rank.size), count) / 2)
                output = mine[rows_of(count, rank.size, rank.rank)]
                got = own.run("reducescatter", f"{dtype} {count} rows", mine, output, reduce_op=PRODUCT)
                wanted = product(range(rank.size), count)[rows_of(count, rank.size, rank.rank)]
                assert np.array_equal(read(got), wanted)
            total = own.allreduce(stored(np.full(5, 1 + 2j), dtype), f"sum {dtype}", "sum")
            assert np.array_equal(read(total), np.full(5, rank.size * (1 + 2j)))
        own.close()

    run_ranks(body, hosts)
    launched = {"staged": 0, "nccl": len(NUMPY_OF_COMPLEX) * sum(hosts)}
    assert nccl.counts()["launched"] == launched[way]
    assert nccl.counts()["mismatches"] == 0


@on_ranks((3,))
def test_many_of_both_at_once(rank: Rank, gpu: Gpu, nccl: Nccl) -> None:
    own = on_gpu(rank, gpu, nccl)
    for turn in range(3):
        arrays = [stored(factor(rank.rank, 50 + k, turn), "complex64") for k in range(12)]
        begun = [
            own.submit("allreduce", f"x{k}", array, reduce_op=PRODUCT if k % 2 else SUM)
            for k, array in enumerate(arrays)
        ]
        for handle, _, _ in begun:
            own.finish(handle)
        gpu.synchronize(own.stream)
        for k, (_, address, _) in enumerate(begun):
            got = read(gpu.get(address, arrays[k]))
            factors = [factor(r, 50 + k, turn) for r in range(rank.size)]
            assert np.array_equal(got, product(range(rank.size), 50 + k, turn) if k % 2 else sum(factors))
    own.close()
