"""Tensors on GPUs in all functions of ``horo.torch``, staged and by NCCL. Doubles stand for both: ``gpu_double``."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import gpu_checks
import gpu_double
import pytest
import torch
from doubles import CUDA, NCCL, build_double
from interrupts import interrupt
from rank_pool import RankPool, on, on_own

import horo.torch as hvd
from horo.errors import HoroError, MismatchError, ResourceError, UnsupportedError, UsageError
from horo.torch.engine import runtime
from horo.torch.optimizer import backward_hooks


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two ranks of this module's own: each gets the double."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_double(CUDA, tmp_path_factory.mktemp("double"), DELAYS=20))


@on("pool")
def test_values_are_taken_behind_the_current_stream_which_waits_for_the_results(double: str) -> None:
    gpu = gpu_double.load(double)
    other = gpu.make_stream()
    for stream, waiting in ((0, 0), (other, other), (0, other)):
        gpu.stream = stream
        gate = gpu.hold()
        x, y = gpu.put(torch.full((1000,), float(hvd.rank()))), gpu.put(torch.ones(5, 3))
        gpu.add(x, 1.0)
        handles = [hvd.allreduce_async_(x, op=hvd.Sum), hvd.allreduce_async(y, op=hvd.Sum, name="y")]
        assert not any(map(hvd.poll, handles))
        gpu.open(gate)
        gpu.stream = waiting
        results = [hvd.synchronize(handle) for handle in handles]
        assert results[0] is x and results[1].device == torch.device("cuda", 0)
        gpu.add(x, 0.5)
        assert torch.equal(gpu.read(x), torch.full((1000,), 3.5))
        assert torch.equal(gpu.read(results[1]), torch.full((5, 3), 2.0))
        used = (x, y, results[1])  # an input, too, must not be given to others before it has been read
        assert [(tensor.data_ptr(), gpu.stream) for tensor in used] == gpu.recorded[-3:]
    gpu.stream = 0


@pytest.mark.parametrize("on_gpu", [(0, 1), (0,), (1,)], ids=str)
@pytest.mark.parametrize("check", ["reductions", "moves", "large_reductions"])
@on("pool")
def test_a_check_of_real_gpus(double: str, on_gpu: tuple[int, ...], check: str) -> None:
    getattr(gpu_checks, check)(gpu_double.load(double), on_gpu)


def test_gradients_on_a_gpu_travel_while_backward_runs_however_busy_the_cores(pool: RankPool, double: str) -> None:
    def check(path: str) -> list[int]:
        gpu = gpu_double.load(path)
        threads, bytes_before = torch.get_num_threads(), backward_hooks.BUCKET_BYTES
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        backward_hooks.BUCKET_BYTES = 1
        counts, counters = [], runtime.current().core.counters
        weights = [torch.nn.Parameter(gpu.put(torch.ones(4))) for _ in range(3)]
        named = [(f"w{i}", weight) for i, weight in enumerate(weights)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), named_parameters=named)
        optimizer.step()  # the first reduction has one request more
        for weight in weights:
            weight.grad = gpu.put(torch.zeros(4))
        counts.append(counters()["requests"])
        weights[0].register_post_accumulate_grad_hook(lambda _: counts.append(counters()["requests"]))
        value = torch.ones(4)
        for weight in weights:  # the first one is the last one of backward
            value = value * weight
        (value.sum() * (hvd.rank() + 1)).backward()
        for weight in weights:
            assert weight.grad is not None and weight.grad.is_cuda
            assert gpu.read(weight.grad).tolist() == [1.5] * 4
        optimizer.step()
        torch.set_num_threads(threads)
        backward_hooks.BUCKET_BYTES = bytes_before
        return [count - counts[0] for count in counts[1:]]

    assert pool.run(check, double) == [[3], [3]]


@on("pool")
def test_an_exception_of_a_signal_handler_while_values_are_on_their_way_loses_nothing(double: str) -> None:
    gpu = gpu_double.load(double)
    x = gpu.put(torch.full((5 << 18,), float(hvd.rank())))
    hvd.barrier()
    gpu.lib.double_let_copies(0)
    handle = hvd.allreduce_async_(x, op=hvd.Sum, name="x")
    interrupt(lambda: hvd.synchronize(handle), KeyboardInterrupt, lambda: True)
    assert not hvd.poll(handle)
    gpu.lib.double_let_copies(-1)
    assert hvd.synchronize(handle) is x
    assert torch.equal(gpu.read(x), torch.ones(5 << 18))


@on("pool")
def test_what_cannot_be_done_is_refused_and_the_next_call_works(double: str) -> None:
    gpu = gpu_double.load(double)
    gpu.capture(True)
    with pytest.raises(UsageError, match="current stream is being captured into a CUDA graph"):
        hvd.allreduce(gpu.put(torch.ones(2)))
    gpu.capture(False)
    gpu.lib.double_limit_pinned(0)
    size = 40 << 20  # more than four times what is idle of other calls
    with pytest.raises(ResourceError, match=rf"no {size} bytes of pinned memory: .* out of memory"):
        hvd.allreduce(gpu.put(torch.ones(size // 4)), name="large")
    gpu.lib.double_limit_pinned(1 << 30)
    with pytest.raises(UnsupportedError, match="its tensors are on cuda:0 and cpu; those of one call must be"):
        hvd.grouped_allreduce([gpu.put(torch.ones(2)), torch.ones(2)])
    with pytest.raises(UsageError, match="there is no device 7; this process sees 2"):
        hvd.allreduce(gpu.put(torch.ones(2), 7))
    x, y = gpu.put(torch.ones(2)), torch.ones(2)
    hvd.grouped_allreduce_([x, y], op=hvd.Sum)
    assert gpu.read(x).tolist() == y.tolist() == [2, 2]
    assert gpu.read(hvd.allreduce(gpu.put(torch.ones(2), 1), op=hvd.Sum)).tolist() == [2, 2]


@pytest.mark.parametrize("is_current", [True, False])
@on("pool")
def test_results_for_a_stream_that_is_captured_are_refused_and_come_later(double: str, is_current: bool) -> None:
    """Also where it is a stream of another GPU than the current one, of which torch was asked."""
    gpu, r = gpu_double.load(double), hvd.rank()
    if not is_current:
        torch.cuda.is_current_stream_capturing = lambda: False
    handles = [
        hvd.allreduce_async(gpu.put(torch.ones(2)), op=hvd.Sum, name="sum"),
        hvd.allgather_async(gpu.put(torch.full((1,), float(r))), name="rows"),
        hvd.allgather_async(gpu.put(torch.empty(0)), name="none"),
    ]
    for handle, values in zip(handles, ([2, 2], [0, 1], []), strict=True):
        is_refused = is_current or values == [2, 2]  # the other copies are torch's, which refuses them itself
        gpu.capture(is_refused)
        for _ in range(2 if is_refused else 0):
            with pytest.raises(UsageError, match="current stream is being captured into a CUDA graph"):
                hvd.synchronize(handle)
        gpu.capture(False)
        assert gpu.read(hvd.synchronize(handle)).tolist() == values
    torch.cuda.is_current_stream_capturing = gpu.is_capturing


@on("pool")
def test_it_works_again_after_shutdown_and_init(double: str) -> None:
    gpu = gpu_double.load(double)
    assert gpu.read(hvd.allreduce(gpu.put(torch.ones(2)), op=hvd.Sum)).tolist() == [2, 2]
    gate = gpu.hold()
    handle = hvd.allreduce_async(gpu.put(torch.ones(2)), name="left")
    assert not hvd.poll(handle)
    hvd.barrier()
    gpu.open(gate)
    hvd.shutdown()
    hvd.init()
    assert gpu.read(hvd.allreduce(gpu.put(torch.ones(2)), op=hvd.Sum)).tolist() == [2, 2]


@pytest.mark.parametrize("name", ["x", None])
@on("ranks2")
def test_without_a_driver_the_places_are_named_also_to_the_others(name: str | None) -> None:
    class Elsewhere(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl
        is_cpu, is_cuda, device = False, True, torch.device("cuda", 0)

    kept = torch.cuda.current_stream
    torch.cuda.current_stream = lambda device=None: gpu_double.Stream(0)
    try:
        for on_gpu in ((0, 1), (0,), (1,)):
            x, told = torch.ones(2), "rank . .* has refused it: "
            if hvd.rank() in on_gpu:
                x, told = x.as_subclass(Elsewhere), "^"
            with pytest.raises(ResourceError, match=rf"{told}no usable CUDA driver: libcuda\.so\.1"):
                hvd.allreduce_(x, name=name)
    finally:
        torch.cuda.current_stream = kept
    assert hvd.allreduce(torch.ones(2), name=name, op=hvd.Sum).tolist() == [2, 2]


BY_NAME = {check.__name__: check for check in gpu_checks.ON_A_TORCH_DEVICE}


def on_cpu(check: Callable[[torch.device], None]) -> None:
    check(torch.device("cpu"))


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("pool", ["ranks1_always", "ranks2"])
def test_it_holds_on_cpus(request: pytest.FixtureRequest, pool: str, name: str) -> None:
    request.getfixturevalue(pool).run(on_cpu, BY_NAME[name])


BY_NCCL = {"HOROVOD_GPU_OPERATIONS": "NCCL"}


@pytest.fixture
def doubles(tmp_path: Path) -> tuple[str, str]:
    if NCCL in Path("/proc/self/maps").read_text():
        pytest.skip(
            "this torch has loaded an NCCL of its own, which goes before the double "
            "(`make test TORCH=/path/of/a/build/for/CPUs.whl`)"
        )
    cuda = build_double(CUDA, tmp_path, DELAYS=20, DEVICES=8)
    return str(cuda), str(build_double(NCCL, tmp_path, CUDA_DOUBLE=f'"{cuda}"', DELAYS=5))


@pytest.fixture
def nccl_pool(doubles: tuple[str, str]) -> Iterator[RankPool]:
    """Two ranks that find the doubles in their process, and see eight GPUs."""

    def begin(*paths: str) -> None:
        gpu_double.load(*paths)
        hvd.init()

    pool = RankPool(2, init=False, environment=BY_NCCL)
    pool.run(begin, *doubles)
    yield pool
    pool.close()


@on("nccl_pool")
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
    x = gpu.put(torch.ones(50), r)  # an input that the program frees is read by a stream that torch does not know
    handle = hvd.allreduce_async(x, op=hvd.Sum)
    gpu.stream = gpu.make_stream()
    result = hvd.synchronize(handle)
    assert {(x.data_ptr(), gpu.stream), (result.data_ptr(), gpu.stream)} <= set(gpu.recorded)
    gpu.stream = 0


@on("nccl_pool")
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


@on("nccl_pool")
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


@on("nccl_pool")
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


@on("nccl_pool")
def test_process_sets_by_nccl_which_joins_no_rank(doubles: tuple[str, str]) -> None:
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
    with pytest.raises(UnsupportedError, match=r"^join: not with HORO_GPU_OPERATIONS=nccl"):
        hvd.join()
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2, 2, 2]
