"""Tensors on GPUs in all functions of ``horo.torch``. A double stands for the GPU: see ``gpu_double``."""

import os
from collections.abc import Callable, Iterator

import gpu_checks
import gpu_double
import pytest
import torch
from doubles import CUDA, build_double
from interrupts import interrupt
from rank_pool import RankPool, on

import horo.torch as hvd
from horo.errors import ResourceError, UnsupportedError, UsageError
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
    for stream in (0, gpu.make_stream()):
        gpu.stream = stream
        gate = gpu.hold()
        x, y = gpu.put(torch.full((1000,), float(hvd.rank()))), gpu.put(torch.ones(5, 3))
        gpu.add(x, 1.0)
        handles = [hvd.allreduce_async_(x, op=hvd.Sum), hvd.allreduce_async(y, op=hvd.Sum, name="y")]
        assert not any(map(hvd.poll, handles))
        gpu.open(gate)
        results = [hvd.synchronize(handle) for handle in handles]
        assert results[0] is x and results[1].device == torch.device("cuda", 0)
        gpu.add(x, 0.5)
        assert torch.equal(gpu.read(x), torch.full((1000,), 3.5))
        assert torch.equal(gpu.read(results[1]), torch.full((5, 3), 2.0))
        used = (x, y, results[1])  # an input, too, must not be given to others before it has been read
        assert [(tensor.data_ptr(), gpu.stream) for tensor in used] == gpu.recorded[-3:]
    gpu.stream = 0


@on("pool")
def test_the_stream_that_waits_is_the_one_of_synchronize(double: str) -> None:
    gpu = gpu_double.load(double)
    x = gpu.put(torch.ones(70_000))
    handle = hvd.allreduce_async_(x, op=hvd.Sum)
    gpu.stream = gpu.make_stream()
    hvd.synchronize(handle)
    gpu.add(x, 1.0)
    assert torch.equal(gpu.read(x), torch.full((70_000,), 3.0))
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
