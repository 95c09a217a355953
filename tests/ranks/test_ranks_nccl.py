"""Tensors on GPUs by NCCL, in processes. Doubles stand for the CUDA driver and for NCCL: see ``gpu_double``."""

from collections.abc import Iterator
from pathlib import Path

import gpu_double
import pytest
import torch
from doubles import CUDA, NCCL, build_double
from rank_pool import RankPool, on, on_own

import horo.torch as hvd
from horo.errors import HoroError, MismatchError, UnsupportedError, UsageError

BY_NCCL = {"HOROVOD_GPU_OPERATIONS": "NCCL"}
pytestmark = pytest.mark.skipif(
    NCCL in Path("/proc/self/maps").read_text(),
    reason="this torch has loaded an NCCL of its own, which goes before the double "
    "(`make test TORCH=/path/of/a/build/for/CPUs.whl`)",
)


@pytest.fixture
def doubles(tmp_path: Path) -> tuple[str, str]:
    cuda = build_double(CUDA, tmp_path, DELAYS=20, DEVICES=8)
    return str(cuda), str(build_double(NCCL, tmp_path, CUDA_DOUBLE=f'"{cuda}"', DELAYS=5))


@pytest.fixture
def pool(doubles: tuple[str, str]) -> Iterator[RankPool]:
    """Two ranks that find the doubles in their process, and see eight GPUs."""

    def begin(*paths: str) -> None:
        gpu_double.load(*paths)
        hvd.init()

    pool = RankPool(2, init=False, environment=BY_NCCL)
    pool.run(begin, *doubles)
    yield pool
    pool.close()


@on("pool")
def test_functions_by_nccl(doubles: tuple[str, str]) -> None:
    gpu, r = gpu_double.load(*doubles), hvd.rank()
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
    for _ in range(3):
        gathered = hvd.allgather(gpu.put(torch.full((r + 1, 2), r), r))
        assert gathered.device == torch.device("cuda", r)
        assert gpu.read(gathered).tolist() == [[0, 0], [1, 1], [1, 1]]
    pair = hvd.grouped_allgather([gpu.put(own, r), gpu.put(torch.empty(0, 2), r)])
    assert [gpu.read(one).tolist() for one in pair] == [[1, 2, 3, 2, 4, 6], []]
    received, splits = hvd.alltoall(gpu.put(torch.arange(3) + 10 * r, r), torch.tensor([1, 2]))
    assert gpu.read(received).tolist() == ([0, 10] if r == 0 else [1, 2, 11, 12])
    assert splits.tolist() == [r + 1, r + 1]
    adasum = hvd.allreduce(gpu.put(own, r), op=hvd.Adasum)
    assert gpu.read(adasum).tolist() == [1.5, 3, 4.5]
    assert hvd.allreduce(own, op=hvd.Sum).tolist() == [3, 6, 9]
    launches(0)
    with pytest.raises(MismatchError, match="sent it on the GPU that NCCL uses"):
        hvd.allreduce(gpu.put(own, r) if r == 0 else own, op=hvd.Sum)


@on("pool")
def test_a_tensor_on_another_gpu_is_an_error_that_names_both(doubles: tuple[str, str]) -> None:
    """Each rank has chosen the GPU of the other one."""
    gpu, r = gpu_double.load(*doubles), hvd.rank()
    hvd.shutdown()
    hvd.init(device=f"cuda:{1 - r}")
    hvd.init(device=1 - r)  # again, which does nothing
    with pytest.raises(UsageError, match=rf"init\(device='cuda:{r}'\): horo is initialized already, with cuda:"):
        hvd.init(device=r)
    said = "its tensors are on cuda:1, and NCCL was set up for cuda:0"
    with pytest.raises(UsageError, match=said if r == 1 else rf"^rank 1 \(.*{said}"):
        hvd.allreduce(gpu.put(torch.ones(3), 1), name="x")
    x = gpu.put(torch.full((3,), r + 1.0), 1 - r)
    assert gpu.read(hvd.allreduce(x, op=hvd.Sum)).tolist() == [3, 3, 3]


def test_a_rank_without_nccl_ends_init_on_all(doubles: tuple[str, str]) -> None:
    def check(*paths: str) -> tuple[str, str]:
        gpu_double.load(*paths)
        with pytest.raises(HoroError) as caught:
            hvd.init()
        assert not hvd.is_initialized()
        return type(caught.value).__name__, str(caught.value)

    pool = RankPool(2, init=False, environment=BY_NCCL)
    (kind, words), (other_kind, other) = pool.run_each(check, [doubles, doubles[:1]])
    pool.close()
    assert (kind, other_kind) == ("AbortedError", "ResourceError")
    assert words == other
    assert words.startswith("NCCL on rank 1 (")
    assert "no usable NCCL: " in words


@on_own(1, init=False, **BY_NCCL)
def test_a_rank_alone_joins(doubles: tuple[str, str]) -> None:
    gpu = gpu_double.load(*doubles)
    hvd.init()
    assert gpu.read(hvd.allreduce(gpu.put(torch.ones(3)), op=hvd.Sum)).tolist() == [1, 1, 1]
    assert hvd.join() == 0


@on("pool")
def test_a_first_call_that_one_rank_refuses_fails_on_all(doubles: tuple[str, str]) -> None:
    """That rank goes on in host memory: nobody waits for its first tensor on a GPU."""
    gpu, r = gpu_double.load(*doubles), hvd.rank()
    said = "root_rank 7 is not a rank of this job"
    with pytest.raises(UsageError, match=said if r == 1 else rf"^rank 1 \(.*{said}"):
        hvd.broadcast(gpu.put(torch.ones(3), r), 7 if r == 1 else 0, name="x")
    with pytest.raises(MismatchError, match="sent it on the GPU that NCCL uses"):
        hvd.allreduce(gpu.put(torch.ones(3), r) if r == 0 else torch.ones(3), name="y")
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2, 2, 2]
    assert gpu.read(hvd.allreduce(gpu.put(torch.ones(3), r), op=hvd.Sum)).tolist() == [2, 2, 2]
    assert gpu.launched() == 1


@on("pool")
def test_compression_is_torchs(doubles: tuple[str, str]) -> None:
    """A tensor is narrowed on its GPU, so that NCCL reduces it as it is; an optimizer's gradients, too."""

    gpu, r = gpu_double.load(*doubles), hvd.rank()
    own = torch.tensor([1.0, 2.0, 3.0]) * (r + 1)
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        narrow = hvd.allreduce(gpu.put(own + 2.0**-20, r), op=hvd.Sum, compression=compression)
        assert narrow.dtype is torch.float32
        assert gpu.read(narrow).tolist() == [3, 6, 9]
    assert gpu.launched() == 2
    weight = torch.nn.Parameter(gpu.put(torch.ones(4), r))
    sgd = torch.optim.SGD([weight], lr=1.0)
    options = {"named_parameters": [("w", weight)], "compression": hvd.Compression.fp16}
    optimizer = hvd.DistributedOptimizer(sgd, **options)
    weight.grad = gpu.put(torch.full((4,), r + 2.0**-20), r)
    optimizer.synchronize()
    assert weight.grad.dtype is torch.float32
    assert gpu.read(weight.grad).tolist() == [0.5] * 4
    assert gpu.launched() == 3


@on("pool")
def test_process_sets_by_nccl(doubles: tuple[str, str]) -> None:
    gpu, r = gpu_double.load(*doubles), hvd.rank()
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


@on("pool")
def test_tensors_of_a_request_are_kept_until_the_stream_that_waits_is_behind_it(doubles: tuple[str, str]) -> None:
    """An input that the program frees is read by a stream that torch does not know."""

    gpu, r = gpu_double.load(*doubles), hvd.rank()
    x = gpu.put(torch.ones(50), r)
    handle = hvd.allreduce_async(x, op=hvd.Sum)
    gpu.stream = gpu.make_stream()
    result = hvd.synchronize(handle)
    assert {(x.data_ptr(), gpu.stream), (result.data_ptr(), gpu.stream)} <= set(gpu.recorded)
    gpu.stream = 0


@on("pool")
def test_no_rank_can_join() -> None:
    with pytest.raises(UnsupportedError, match=r"^join: not with HORO_GPU_OPERATIONS=nccl"):
        hvd.join()
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2, 2, 2]
