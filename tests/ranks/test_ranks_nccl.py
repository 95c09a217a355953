"""Tensors on GPUs by NCCL, in processes. Doubles stand for the CUDA driver and for NCCL: see ``gpu_double``."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import gpu_double
import pytest
import torch
from doubles import CUDA, NCCL, build_double
from rank_pool import RankPool

import horo.torch as hvd
from horo.errors import MismatchError, PeerLostError, UsageError

BY_NCCL = {"HOROVOD_GPU_OPERATIONS": "NCCL"}
pytestmark = pytest.mark.skipif(
    NCCL in Path("/proc/self/maps").read_text(),
    reason="this torch has loaded an NCCL of its own, which goes before the double "
    "(`make test TORCH=/path/of/a/build/for/CPUs.whl`)",
)


@pytest.fixture
def doubles(tmp_path: Path) -> tuple[str, str]:
    cuda = build_double(CUDA, tmp_path, DELAYS=20)
    return str(cuda), str(build_double(NCCL, tmp_path, CUDA_DOUBLE=f'"{cuda}"', DELAYS=5))


@pytest.fixture
def pool() -> Iterator[RankPool]:
    pool = RankPool(2, environment=BY_NCCL)
    yield pool
    pool.close()


def test_functions_by_nccl(pool: RankPool, doubles: tuple[str, str]) -> None:
    def check(*paths: str) -> None:
        gpu, r = gpu_double.load(*paths), hvd.rank()
        assert hvd.config()["gpu_operations"] == "nccl"
        own = torch.tensor([1.0, 2.0, 3.0]) * (r + 1)

        def launches(count: int) -> None:
            assert gpu.launched() == launches.before + count  # type: ignore[attr-defined]
            launches.before = gpu.launched()  # type: ignore[attr-defined]

        launches.before = 0  # type: ignore[attr-defined]
        x = gpu.put(own, r)
        gate = gpu.hold()
        gpu.add(x, 1.0)
        assert hvd.allreduce_(x, op=hvd.Sum) is x  # while the GPU stands still
        gpu.add(x, 0.5)
        gpu.open(gate)
        assert gpu.read(x).tolist() == [5.5, 8.5, 11.5]
        launches(1)
        mean = hvd.allreduce(gpu.put(own.bfloat16(), r))
        assert gpu.read(mean).tolist() == [1.5, 3, 4.5]
        launches(1)
        group = hvd.grouped_allreduce([gpu.put(own, r), gpu.put(torch.ones(2, 0), r), gpu.put(own[:1].double(), r)])
        assert [gpu.read(one).tolist() for one in group] == [[1.5, 3, 4.5], [[], []], [1.5]]
        launches(2)
        rows = hvd.reducescatter(gpu.put(torch.arange(10.0).view(5, 2), r), op=hvd.Sum)
        assert torch.equal(gpu.read(rows), 2 * torch.arange(10.0).view(5, 2)[slice(0, 3) if r == 0 else slice(3, 5)])
        launches(2)
        assert gpu.read(hvd.broadcast(gpu.put(torch.full((3,), r), r), 1)).tolist() == [1, 1, 1]
        launches(1)
        for _ in range(3):  # the rows of each rank, by two broadcasts
            gathered = hvd.allgather(gpu.put(torch.full((r + 1, 2), r), r))
            assert gathered.device == torch.device("cuda", r)
            assert gpu.read(gathered).tolist() == [[0, 0], [1, 1], [1, 1]]
        launches(6)
        pair = hvd.grouped_allgather([gpu.put(own, r), gpu.put(torch.empty(0, 2), r)])
        assert [gpu.read(one).tolist() for one in pair] == [[1, 2, 3, 2, 4, 6], []]
        launches(1)
        received, splits = hvd.alltoall(gpu.put(torch.arange(3) + 10 * r, r), torch.tensor([1, 2]))
        assert gpu.read(received).tolist() == ([0, 10] if r == 0 else [1, 2, 11, 12])
        assert splits.tolist() == [r + 1, r + 1]
        launches(4)
        adasum = hvd.allreduce(gpu.put(own, r), op=hvd.Adasum)
        assert gpu.read(adasum).tolist() == [1.5, 3, 4.5]
        launches(4 + 1 + 2)  # one value for each rank, and one that does not divide
        assert hvd.allreduce(own, op=hvd.Sum).tolist() == [3, 6, 9]
        launches(0)
        with pytest.raises(MismatchError, match="sent it on the GPU that NCCL uses"):
            hvd.allreduce(gpu.put(own, r) if r == 0 else own, op=hvd.Sum)

    pool.run(check, *doubles)


def test_a_first_call_that_one_rank_refuses_fails_on_all(pool: RankPool, doubles: tuple[str, str]) -> None:
    """That rank goes on in host memory: nobody waits for its first tensor on a GPU."""

    def check(*paths: str) -> str:
        gpu, r = gpu_double.load(*paths), hvd.rank()
        with pytest.raises(UsageError) as caught:
            hvd.broadcast(gpu.put(torch.ones(3), r), 7 if r == 1 else 0, name="x")
        with pytest.raises(MismatchError, match="sent it on the GPU that NCCL uses"):
            hvd.allreduce(gpu.put(torch.ones(3), r) if r == 0 else torch.ones(3), name="y")
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2, 2, 2]
        assert gpu.read(hvd.allreduce(gpu.put(torch.ones(3), r), op=hvd.Sum)).tolist() == [2, 2, 2]
        assert gpu.launched() == 1
        return str(caught.value)

    words = pool.run(check, *doubles)
    assert "root_rank 7 is not a rank of this job" in words[1]
    assert words[0].startswith("rank 1 (")
    assert words[0].endswith(words[1])


def test_what_kernels_convert(pool: RankPool, doubles: tuple[str, str]) -> None:
    def check(*paths: str) -> None:
        gpu, r = gpu_double.load(*paths), hvd.rank()
        own = torch.tensor([1.0, 2.0, 3.0]) * (r + 1)
        for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
            narrow = hvd.allreduce(gpu.put(own + 2.0**-20, r), op=hvd.Sum, compression=compression)
            assert gpu.read(narrow).tolist() == [3, 6, 9]
        assert gpu.read(hvd.allreduce(gpu.put(own.int(), r))).tolist() == [1, 3, 4]
        group = hvd.grouped_allreduce([gpu.put(own.short(), r), gpu.put(own > 2, r)], op=hvd.Max)
        assert [gpu.read(one).tolist() for one in group] == [[2, 4, 6], [False, True, True]]
        assert gpu.launched() == 5

    pool.run(check, *doubles)


def test_adasum_is_calculated_on_the_gpu(pool: RankPool, doubles: tuple[str, str]) -> None:
    """By a program: in all forms, and in an optimizer, whose ranks step by their own gradients."""

    def check(*paths: str) -> list[list[float]]:
        gpu, r = gpu_double.load(*paths), hvd.rank()
        drawn = [torch.randn(3001, generator=torch.Generator().manual_seed(i)) for i in range(2)]
        before = gpu.launched()
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            x = gpu.put(drawn[r].to(dtype), r)
            staged = hvd.allreduce(drawn[r].to(dtype), op=hvd.Adasum)
            gate = gpu.hold()
            handle = hvd.allreduce_async(x, op=hvd.Adasum)
            result = hvd.synchronize(handle)  # while the GPU stands still
            gpu.open(gate)
            bound = 4 * torch.finfo(dtype).eps
            assert torch.allclose(gpu.read(result).double(), staged.double(), rtol=bound, atol=bound), dtype
            assert gpu.read(hvd.allreduce_(x, op=hvd.Adasum)).tolist() == gpu.read(result).tolist()
        group = [gpu.put(each, r) for each in (drawn[r], drawn[r].double(), drawn[r][:5], drawn[r][:0])]
        for mine, found in zip(group, hvd.grouped_allreduce(group, op=hvd.Adasum), strict=True):
            staged = hvd.allreduce(gpu.read(mine).clone(), op=hvd.Adasum)
            assert torch.allclose(gpu.read(found), staged, rtol=1e-5, atol=1e-6)
        assert gpu.launched() > before
        weight = torch.nn.Parameter(gpu.put(torch.ones(4), r))
        sgd = torch.optim.SGD([weight], lr=1.0)
        optimizer = hvd.DistributedOptimizer(sgd, named_parameters=[("w", weight)], op=hvd.Adasum)
        weight.grad = gpu.put(torch.tensor([1.0, 0.0, 0.0, 2.0] if r == 0 else [0.0, 3.0, 0.0, 0.0]), r)
        optimizer.step()
        return [gpu.read(weight.data).tolist()]

    assert pool.run(check, *doubles) == [[[0.0, -2.0, 1.0, -1.0]]] * 2  # orthogonal steps add


def test_process_sets_by_nccl(pool: RankPool, doubles: tuple[str, str]) -> None:
    def check(*paths: str) -> None:
        gpu, r = gpu_double.load(*paths), hvd.rank()
        for step in range(2):
            sets = [hvd.add_process_set([0]), hvd.add_process_set([1])]
            handles = [
                hvd.allreduce_async(gpu.put(2 * torch.ones(3), r), op=hvd.Sum, process_set=sets[r]),
                hvd.allreduce_async(gpu.put(torch.ones(3), r), op=hvd.Sum),
            ]
            for handle in handles if r == 0 else handles[::-1]:
                assert gpu.read(hvd.synchronize(handle)).tolist() == [2, 2, 2]
            assert gpu.launched() == (step + 1) * 2
            assert all(hvd.remove_process_set(each) for each in sets)

    pool.run(check, *doubles)


def test_tensors_of_a_request_are_kept_until_the_stream_that_waits_is_behind_it(
    pool: RankPool, doubles: tuple[str, str]
) -> None:
    """An input that the program frees is read by a stream that torch does not know."""

    def check(*paths: str) -> None:
        gpu, r = gpu_double.load(*paths), hvd.rank()
        x = gpu.put(torch.ones(50), r)
        handle = hvd.allreduce_async(x, op=hvd.Sum)
        gpu.stream = gpu.make_stream()
        result = hvd.synchronize(handle)
        assert {(x.data_ptr(), gpu.stream), (result.data_ptr(), gpu.stream)} <= set(gpu.recorded)
        gpu.stream = 0

    pool.run(check, *doubles)


def test_rows_are_there_behind_the_stream_that_takes_them(pool: RankPool, doubles: tuple[str, str]) -> None:
    def check(*paths: str) -> None:
        gpu, r = gpu_double.load(*paths), hvd.rank()
        x = gpu.put(torch.full((50,), float(r)), r)
        gate = gpu.hold()
        gpu.add(x, 1.0)
        handle = hvd.allgather_async(x)
        result = hvd.synchronize(handle)  # while the GPU stands still
        assert (x.data_ptr(), gpu.stream) in gpu.recorded
        gpu.add(result, 0.5)
        gpu.open(gate)
        assert gpu.read(result).tolist() == [1.5] * 50 + [2.5] * 50

    pool.run(check, *doubles)


def test_an_optimizer_averages_gradients(pool: RankPool, doubles: tuple[str, str]) -> None:
    def check(*paths: str) -> list[float]:
        gpu, r = gpu_double.load(*paths), hvd.rank()
        weight = torch.nn.Parameter(gpu.put(torch.ones(4), r))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), named_parameters=[("w", weight)])
        weight.grad = gpu.put(torch.full((4,), float(r)), r)
        optimizer.synchronize()
        return gpu.read(weight.grad).tolist()

    assert pool.run(check, *doubles) == [[0.5] * 4] * 2


def test_ranks_with_uneven_data_go_on(pool: RankPool, doubles: tuple[str, str]) -> None:
    """One rank has four steps and the other one, which has joined behind that."""

    def check(*paths: str) -> None:
        gpu, r = gpu_double.load(*paths), hvd.rank()
        assert gpu.read(hvd.broadcast(gpu.put(torch.ones(3), r), 0)).tolist() == [1, 1, 1]  # both have a GPU now
        before = gpu.launched()
        for longer in (0, 1, 0):
            for step in range(4 if r == longer else 1):
                there = [0, 1] if step == 0 else [longer]
                own = torch.full((300,), r + 1)
                total = hvd.allreduce(gpu.put(own.float(), r), op=hvd.Sum)
                assert gpu.read(total).tolist() == [sum(i + 1 for i in there)] * 300
                mean = hvd.allreduce(gpu.put(own.double(), r))
                assert gpu.read(mean).tolist() == [sum(i + 1 for i in there) / 2] * 300
                least = hvd.allreduce(gpu.put(own, r), op=hvd.Min)
                assert gpu.read(least).tolist() == [there[0] + 1] * 300
                rows = hvd.allgather(gpu.put(own[: 2 + r], r))
                assert gpu.read(rows).tolist() == [i + 1 for i in there for _ in range(2 + i)]
            assert hvd.join() == longer
        # rows that are unequal are a broadcast of each rank that has some
        assert gpu.launched() == before + 3 * (4 * 3 + 2 + 3)

    pool.run(check, *doubles)


def test_a_rank_that_is_killed_while_kernels_run_frees_the_gpus_of_others(
    pool: RankPool, doubles: tuple[str, str]
) -> None:
    def check(*paths: str) -> str:
        gpu, r = gpu_double.load(*paths), hvd.rank()
        x = gpu.put(torch.ones(50), r)
        hvd.allreduce_(x, op=hvd.Sum)
        if r == 1:
            gpu.hold()  # never opened: its part of the next call does not run
        hvd.allreduce_(x, op=hvd.Sum)
        if r == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        gpu.read(x)  # waits for the GPU, outside of horo
        with pytest.raises(PeerLostError) as caught:
            hvd.allreduce_(x, op=hvd.Sum)
        return str(caught.value)

    said = pool.run_each(check, [doubles] * 2, lost=[1])[0]
    assert said.startswith("rank 1 (")
