"""Tensors on GPUs in jobs whose data goes by MPI: staged, so that MPI sees memory of the host only.

A double stands for the GPU; a processor that touches its memory, as an MPI would, ends the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from device_group import SUM, Gpu, OnGpu
from doubles import CUDA, build_double
from mpi_job import MODES, MpiRank, join
from ranks import describe

from horo.core import context
from horo.core.context import RequestBuffer

pytestmark = pytest.mark.mpi(min_size=2)

COUNTS = [1, 1000, 300_001]


@pytest.fixture(scope="module", params=MODES, ids=str)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MpiRank, Gpu]]:
    """This process as a rank of a job in each of MODES, with a GPU of its own; all is given back when it is over."""
    folder = tmp_path_factory.mktemp("double")
    gpu = Gpu(build_double(CUDA, folder, soname=f"double-cuda-{request.param}.so", DELAYS=20))
    with join(request.param) as rank:
        yield rank, gpu
    left = gpu.counts()
    assert [left[name] for name in ("streams", "contexts", "events", "pinned")] == [0, 0, 0, 0]


@pytest.fixture
def rank(job: tuple[MpiRank, Gpu]) -> MpiRank:
    return job[0]


@pytest.fixture
def gpu(job: tuple[MpiRank, Gpu]) -> Gpu:
    return job[1]


@pytest.fixture(params=["every rank", "every second rank"])
def run(request: pytest.FixtureRequest, gpu: Gpu, rank: MpiRank) -> Iterator[Any]:
    """Does an operation and returns its result: on a GPU, or on ranks without one in host memory."""
    own = OnGpu(rank, gpu) if request.param == "every rank" or rank.rank % 2 == 0 else None

    def do(op: str, name: str, array: np.ndarray, output: np.ndarray | None = None, **options: Any) -> np.ndarray:
        result = array if output is None else output
        splits = options.get("splits", ())
        if own is not None:
            if op not in ("allgather", "alltoall"):
                on_gpu: np.ndarray = own.run(op, name, array, output, **options)
                return on_gpu
            handle, _, _ = own.submit(op, name, array, output, **options)
            return own.gathered(handle, array)
        (tensor,) = describe([array], [result])
        options.pop("splits", None)
        handle = rank.context.submit(
            RequestBuffer.of(context.OPS[op], name, [tensor._replace(splits=splits)], **options)
        )
        rank.context.wait(handle)
        if op in ("allgather", "alltoall"):
            result = np.frombuffer(rank.context.take_result(handle, 0)[0], array.dtype)
        rank.context.release(handle)
        return result

    yield do
    if own is not None:
        own.close()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int64])
def test_allreduce_and_reducescatter(rank: MpiRank, run: Any, count: int, dtype: Any) -> None:
    own = (np.arange(count) % 7 + rank.rank).astype(dtype)
    total = (np.arange(count) % 7 * rank.size + rank.size * (rank.size - 1) // 2).astype(dtype)
    assert np.array_equal(run("allreduce", "x", own.copy(), reduce_op=SUM), total)
    assert np.array_equal(run("allreduce", "x", own.copy(), reduce_op=SUM, prescale=2.0, postscale=3.0), total * 6)
    wanted = np.array_split(total, rank.size)[rank.rank]
    assert np.array_equal(run("reducescatter", "y", own, np.zeros_like(wanted), reduce_op=SUM), wanted)


@pytest.mark.parametrize("count", COUNTS)
def test_broadcast_allgather_and_alltoall(rank: MpiRank, run: Any, count: int) -> None:
    everybody = range(rank.size)
    for root in (0, rank.size - 1):
        copied = run("broadcast", "x", np.full(count, rank.rank, np.int16), root_rank=root)
        assert np.array_equal(copied, np.full(count, root, np.int16))
    gathered = run("allgather", "y", np.full(count * (rank.rank % 2 + 1), rank.rank, np.float32))
    assert np.array_equal(gathered, np.repeat(np.arange(rank.size), [count * (r % 2 + 1) for r in everybody]))
    sent = np.repeat([10 * rank.rank + other for other in everybody], count)
    exchanged = run("alltoall", "z", sent, splits=(count,) * rank.size)
    assert np.array_equal(exchanged, np.repeat([10 * other + rank.rank for other in everybody], count))


def test_their_values_go_by_mpi_and_it_gives_all_memory_back(rank: MpiRank, gpu: Gpu) -> None:
    own = OnGpu(rank, gpu)
    before = rank.context.counters()["link_bytes"]
    for _ in range(5):
        assert own.allreduce(np.ones(100_000, np.float32))[0] == rank.size
    after = rank.context.counters()
    assert after["link_bytes"] > before
    assert after["mpi_stranded"] == 0
    own.close()
