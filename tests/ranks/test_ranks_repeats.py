"""Operations called again: the request that is kept from the last call must fit the tensors of this one."""

import copy
import gc
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from jobs import wait_until
from rank_pool import on

import horo.torch as hvd
from horo.core import context
from horo.core.calls import know_torch
from horo.torch.compat.profiler import profiling
from horo.torch.compat.torch_private import exchange_table, forward_mode
from horo.torch.engine import operation, request_cache, runtime
from horo.torch.engine.request import Request


@on("ranks")
def test_a_name_serves_tensors_that_look_different_from_call_to_call() -> None:
    grid = torch.arange(12.0).reshape(3, 4)
    looks = [grid, grid, grid.t(), grid.double(), grid[:, ::2], grid.reshape(-1), torch.tensor(5.0), torch.empty(0)]
    looks += [grid.to(torch.int32), torch.nn.Parameter(grid), grid.clone()]
    for given in [*looks, *reversed(looks)]:
        own = given.detach().clone()
        for name in ("one", None):
            assert torch.equal(hvd.allreduce(given, op=hvd.Sum, name=name), own * hvd.size())
        (grouped,) = hvd.grouped_allreduce([given], op=hvd.Max, name="group")
        assert torch.equal(grouped, own)
        assert torch.equal(given, own)  # nothing but the results was written
        handle = hvd.broadcast_async(given, root_rank=1, name="root")
        assert torch.equal(hvd.synchronize(handle), own)
        if own.dim():
            assert torch.equal(hvd.allgather(given, name="rows"), torch.cat([own] * hvd.size()))


@on("ranks")
def test_the_memory_of_each_call_is_used_and_no_other() -> None:
    tensors = [torch.full((5,), float(hvd.rank())) for _ in range(4)]
    total = float(sum(range(hvd.size())))
    for turn, tensor in enumerate(tensors):
        assert hvd.allreduce_(tensor, op=hvd.Sum, name="turn") is tensor
        for index, other in enumerate(tensors):
            assert other.tolist() == [total if index <= turn else float(hvd.rank())] * 5
    outputs = [hvd.allreduce(tensors[0], op=hvd.Sum, name="out") for _ in range(3)]
    assert len({tensor.data_ptr() for tensor in [tensors[0], *outputs]}) == 4


CHANGES: list[Callable[[torch.Tensor], Any]] = [
    lambda _: None,
    lambda tensor: tensor.resize_(6).fill_(2.0),
    lambda tensor: tensor.set_(torch.full((2, 4), 3.0)[:, ::2]),
    lambda tensor: tensor.set_(torch.full((3,), 4.0).untyped_storage(), 1, (2,)),
    lambda tensor: setattr(tensor, "data", torch.full((2,), 5.0, dtype=torch.float64)),
    lambda tensor: setattr(tensor, "data", torch.full((2,), 6, dtype=torch.int64)),
    lambda tensor: setattr(tensor, "data", torch.tensor([1 - 7j]).conj().imag),  # negated when it is read
    lambda tensor: setattr(tensor, "data", torch.tensor([8.0])),
    lambda tensor: tensor.requires_grad_(),
]


@on("ranks2")
@pytest.mark.parametrize("has_table", [True, False])
def test_a_tensor_may_change_between_two_calls(has_table: bool) -> None:
    """Also where this torch has no table of functions for C."""
    table = exchange_table() if has_table else None
    know_torch(torch.Tensor, table, profiling, operation.count_change, forward_mode)
    try:
        tensor, out = torch.full((2,), 1.0), torch.empty(2)
        for change in [*CHANGES[:-1], *CHANGES]:
            change(tensor)
            own = tensor.detach().clone().resolve_neg()
            for _ in range(4):
                with torch.no_grad():
                    assert torch.equal(hvd.allreduce(tensor, op=hvd.Sum, name="new"), own * 2)
                    assert torch.equal(hvd.allreduce_(tensor, op=hvd.Max, name="own"), own)
                    assert torch.equal(hvd.allgather(tensor, name="rows"), torch.cat([own, own]))
                    if tensor.shape == out.shape and tensor.dtype == out.dtype:
                        assert torch.equal(hvd.broadcast(tensor, 1, name="out", out=out.zero_()), own)
                        assert hvd.broadcast(tensor, 1, name="out", out=tensor) is tensor
            assert torch.equal(tensor, own)
    finally:
        know_torch(torch.Tensor, exchange_table(), profiling, operation.count_change, forward_mode)


REPEATED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "allreduce_": lambda x, _: hvd.allreduce_(x, name="cut"),
    "allreduce_async_": lambda x, _: hvd.synchronize(hvd.allreduce_async_(x, name="cut")),
    "allreduce": lambda x, _: hvd.allreduce(x, name="cut"),
    "grouped_allreduce_": lambda x, y: hvd.grouped_allreduce_([x, y], name="cut"),
    "broadcast": lambda x, y: hvd.broadcast(x, 0, name="cut", out=y),
    "reducescatter": lambda x, y: hvd.reducescatter(x, name="cut", out=y),
    "allgather": lambda x, y: hvd.allgather(x, name="cut", out=y),
    "alltoall": lambda x, y: hvd.alltoall(x, name="cut", out=y),
}


@on("ranks")
@pytest.mark.parametrize("kind", REPEATED)
def test_a_tensor_whose_storage_was_cut_between_two_calls_is_refused(kind: str) -> None:
    """The memory behind it is another's: as many calls before it as make any of them quick."""
    call = REPEATED[kind]
    counts = [3 * hvd.size(), 3 * hvd.size()]
    if kind in {"allgather", "reducescatter"}:
        counts[kind == "reducescatter"] = 3
    for cut in range(1 if kind.startswith("allreduce") else 2):
        tensors = [torch.ones(2, count)[1] for count in counts]  # at the end of their storages
        for _ in range(4):
            call(*tensors)
        tensors[cut].untyped_storage().resize_(8 * counts[cut] - 4)
        with pytest.raises(hvd.UnsupportedError, match="bytes, and its storage has"):
            call(*tensors)
        hvd.barrier()


@on("ranks")
def test_gathered_results_have_the_rows_of_each_call() -> None:
    """The third call alike offers memory for a result as large as before; others may give other rows by then."""
    r, n = hvd.rank(), hvd.size()
    for name in ("rows", None):
        for turn, rows in enumerate([2, 2, 2, 2, 5, 2, 2, 2, 0, 0, 0, 2, 2, 2]):
            mine = [rows if rank == n - 1 else 2 for rank in range(n)]  # the last rank alone changes
            given = torch.full((mine[r], 3), 10.0 * turn + r)
            whole = torch.cat([torch.full((mine[s], 3), 10.0 * turn + s) for s in range(n)])
            assert torch.equal(hvd.allgather(given, name=name), whole)
            even = torch.arange(n * 2.0).reshape(n, 2) + 100 * r + turn
            got = hvd.alltoall(even, name=name and f"{name} for all")
            assert torch.equal(got, torch.stack([torch.arange(2.0) + 2 * r + 100 * s + turn for s in range(n)]))
            share = hvd.reducescatter(even, op=hvd.Sum, name=name and f"{name} of sums")
            assert torch.equal(share, sum(torch.arange(2.0) + 2 * r + 100 * s + turn for s in range(n))[None])


@on("ranks2")
def test_gathered_dtypes_and_graphs_change_from_call_to_call() -> None:
    grid = torch.arange(8.0).reshape(2, 4)
    large = torch.ones(2, 1 << 19)  # results of 8 MiB, for which no memory is offered
    looks = [grid] * 3 + [grid.double()] * 3 + [grid.to(torch.complex64)] * 3 + [grid.bool()] * 3 + [large] * 3
    for given in [*looks, grid.t().contiguous().t(), grid.t(), *looks]:
        assert torch.equal(hvd.allgather(given, name="g"), torch.cat([given, given]))
        if given.shape[0] == 2:
            row = given[hvd.rank()]
            assert torch.equal(hvd.alltoall(given, name="a"), torch.stack([row, row]))
    for _ in range(4):
        leaf = torch.ones(2, 4, requires_grad=True)
        mine = torch.tensor([3.0, 5.0])[hvd.rank()]  # how each rank weighs what it gets
        (mine * hvd.allgather(leaf, name="g").sum() + mine * hvd.alltoall(leaf, name="a").sum()).backward()
        # of the gather: the mean of what both ranks want; of the exchange: row r is what rank r wants
        assert leaf.grad is not None and leaf.grad.tolist() == [[4.0 + 3.0] * 4, [4.0 + 5.0] * 4]
        hvd.allgather(grid, name="g"), hvd.alltoall(grid, name="a")


@on("ranks2")
def test_every_call_counts_as_one_change_for_autograd() -> None:
    plain, other, strided = torch.ones(3), torch.ones(4), torch.ones(4, 4)[:, ::2]
    with torch.inference_mode():
        frozen = torch.ones(2)
    for _ in range(3):
        before = [tensor._version for tensor in (plain, other, strided)]
        hvd.grouped_allreduce_([plain, other, strided, frozen], name="mixed")
        hvd.grouped_allreduce_([plain, other], name="alike")
        after = [tensor._version for tensor in (plain, other, strided)]
        assert [new - old for new, old in zip(after, before, strict=True)] == [2, 2, 1]
    assert frozen.tolist() == [1.0, 1.0]


@on("ranks2")
def test_factors_are_those_of_each_call() -> None:
    changing, fixed = torch.tensor(1.0), np.array(2.0)
    for turn in range(3):
        changing.fill_(turn)
        for call in (hvd.allreduce, hvd.allreduce_):
            tensor = torch.ones(2)
            kept = call(tensor, op=hvd.Sum, name="factor", prescale_factor=changing, postscale_factor=fixed)
            assert kept.tolist() == [4.0 * turn] * 2
            whole = call(torch.ones(2), op=hvd.Sum, name="factor", prescale_factor=turn, postscale_factor=2)
            assert whole.tolist() == [4.0 * turn] * 2


@on("ranks2")
def test_requests_that_are_kept_hold_no_tensor() -> None:
    seen = []
    for _ in range(3):
        tensor = torch.ones(1000)
        hvd.allreduce_(tensor, name="kept")
        seen += [weakref.ref(tensor), weakref.ref(hvd.allreduce(tensor, name="kept too"))]
        hvd.synchronize(hvd.allreduce_async_(tensor, name="kept as well"))
    del tensor
    gc.collect()
    assert [reference() for reference in seen] == [None] * 6


@on("ranks2")
def test_results_that_nobody_can_ask_for_go_and_others_stay() -> None:
    before, seen = len(runtime.current().requests), []
    handles = [hvd.allreduce_async(torch.full((3,), float(index)), op=hvd.Max) for index in range(70)]
    held = [*copy.deepcopy(handles[:35]), *map(copy.copy, handles[35:])]
    handles.clear()
    for _ in range(400):
        tensor = torch.ones(3)
        seen.append(weakref.ref(tensor))
        handle = hvd.allreduce_async_(tensor, name="polled")
        wait_until(partial(hvd.poll, handle), "done", every_s=0.0)
        del tensor, handle
    assert sum(reference() is not None for reference in seen) <= 170
    assert [hvd.synchronize(handle).tolist() for handle in held] == [[float(index)] * 3 for index in range(70)]
    handles = [hvd.allreduce_async(torch.ones(3)) for _ in range(400)]
    assert all(hvd.synchronize(handle).tolist() == [1.0] * 3 for handle in handles)
    assert len(runtime.current().requests) - before <= 170


@on("ranks2")
def test_more_names_than_are_kept_go_on_working() -> None:
    cache = runtime.current().request_cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_cache, "_WEIGHT_MAX", 400)
        cache.clear()
        for turn in range(2):
            for index in range(50):
                tensor = torch.full((2,), float(index + turn))
                assert hvd.allreduce_(tensor, op=hvd.Max, name=f"many {index}").tolist() == [index + turn] * 2
        group = [torch.ones(1)] * 3
        many = [torch.full((1,), float(index)) for index in range(410)]
        for _ in range(2):
            assert all(t.item() == 1 for t in hvd.grouped_allreduce(group, op=hvd.Max, name="few"))
            result = hvd.grouped_allreduce(many, op=hvd.Max, name="too many")
            assert [t.item() for t in result] == list(range(410))
        assert 0 < len(cache.kept) < 40


@on("ranks2_always")
def test_a_full_cache_loses_one_request_at_a_time_and_none_of_an_optimizer() -> None:
    def made_by(call: Callable[[], object]) -> int:
        made.clear()
        call()
        return len(made)

    def step() -> None:
        optimizer.zero_grad()
        torch.stack([weight.sum() for weight in weights]).sum().backward()
        optimizer.step()

    made: list[None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_cache, "_WEIGHT_MAX", 11 * 8)  # eight requests of one tensor each
        create = request_cache.CachedRequest.__init__
        count = lambda *each, **named: (create(*each, **named), made.append(None))[0]  # noqa: E731
        patch.setattr(request_cache.CachedRequest, "__init__", count)
        gc.collect()  # optimizers of other tests
        runtime.current().request_cache.clear()
        for name in "abcdefghi":
            hvd.allreduce_(torch.ones(2), name=name)
        assert made_by(lambda: [hvd.allreduce_(torch.ones(2), name=name) for name in "bcdefghi"]) == 0
        assert made_by(lambda: hvd.allreduce_(torch.ones(2), name="a")) == 1
        assert made_by(lambda: [hvd.allreduce_(torch.ones(2), name=name) for name in "cdefghia"]) == 0
        weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(40)]
        named = [(f"room.{number}", weight) for number, weight in enumerate(weights)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=0.1), named)
        assert made_by(step) >= 40
        assert made_by(step) == 0


@on("ranks2")
def test_threads_use_one_form_of_call_at_once() -> None:
    def work(index: int) -> list[float]:
        tensors = [torch.full((1,), float(index)) for _ in range(50)]
        return [hvd.allreduce(tensor, op=hvd.Max, name=f"{index}").item() for tensor in tensors] + [
            hvd.synchronize(hvd.allreduce_async(torch.ones(1), op=hvd.Max)).item() for _ in range(50)
        ]

    with ThreadPoolExecutor(4) as threads:
        for index, values in enumerate(threads.map(work, range(4))):
            assert values == [float(index)] * 50 + [1.0] * 50


@on("ranks2_always")
def test_what_horo_does_for_itself_has_no_public_handle() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, gradients_ready="step")
    model(torch.ones(1, 3)).sum().backward()
    numbers = list(runtime.current().requests)
    assert numbers
    for number in numbers:
        for ask in (hvd.poll, hvd.synchronize):
            with pytest.raises(ValueError, match=f"Handle {number} was not created"):
                ask(number)
    optimizer.step()


def _synchronize_in_threads(handle: int, count: int) -> list[Any]:
    """What ``count`` threads and this one get; the other ranks submit the operation when all threads wait."""
    got: list[Any] = []

    def body() -> None:
        try:
            got.append(hvd.synchronize(handle))
        except Exception as error:
            got.append(error)

    def waits(thread: threading.Thread) -> bool:
        frame = sys._current_frames().get(thread.ident or 0)
        while frame is not None and frame.f_code is not Request.wait.__code__:
            frame = frame.f_back
        return frame is not None

    threads = [threading.Thread(target=body, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while not all(map(waits, threads)):
        assert time.monotonic() < deadline
    hvd.barrier()
    try:
        got.append(hvd.synchronize(handle))
    except ValueError as error:  # it may have come too late
        got += [] if "cleared" in str(error) else [error]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return got


@pytest.mark.parametrize("check_ms", [100, 1])
@on("ranks2")
def test_each_gets_the_result_or_the_error(check_ms: int) -> None:
    """Short waits end between two calls of the core, where another thread may release the request."""
    usual, context._SIGNAL_CHECK_MS = context._SIGNAL_CHECK_MS, check_ms
    mine = torch.arange(2.0) + 10 * hvd.rank()
    calls = {
        "allreduce": (lambda name: hvd.allreduce_async(mine, name=name, op=hvd.Sum), [10.0, 12.0]),
        "in place": (lambda name: hvd.allreduce_async_(mine.clone(), name=name, op=hvd.Max), [10.0, 11.0]),
        "allgather": (lambda name: hvd.allgather_async(mine, name=name), [0.0, 1.0, 10.0, 11.0]),
        "wrong": (lambda name: hvd.allreduce_async(torch.ones(2 + hvd.rank()), name=name), None),
    }
    try:
        for turn in range(3):
            for what, (call, wanted) in calls.items():
                name = f"{what} {turn % 2}"
                if hvd.rank() == 0:
                    got = _synchronize_in_threads(call(name), 3)
                    assert len(got) >= 3
                else:
                    hvd.barrier()
                    try:
                        got = [hvd.synchronize(call(name))]
                    except hvd.MismatchError as error:
                        got = [error]
                for result in got:
                    if wanted is None:
                        assert isinstance(result, hvd.MismatchError) and re.search(r"\[2\].*\[3\]", str(result)), result
                    else:
                        assert isinstance(result, torch.Tensor) and result.tolist() == wanted, result
    finally:
        context._SIGNAL_CHECK_MS = usual


class _Interrupting(torch.overrides.TorchFunctionMode):
    """With a mode, such as that of ``set_default_device``, a tensor's method runs Python, and so signal handlers."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self._method = method
        self._has_raised = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == self._method and not self._has_raised:
            self._has_raised = True
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


@on("ranks2")
@pytest.mark.parametrize("method", ["is_neg", "untyped_storage", "storage_offset"])
def test_an_interrupt_where_a_repeated_call_looks_at_its_tensors_is_raised(method: str) -> None:
    tensor, out = torch.ones(2), torch.empty(2)
    for _ in range(3):
        hvd.broadcast(tensor, 0, name="looked at", out=out)
    with _Interrupting(method), pytest.raises(KeyboardInterrupt):
        hvd.broadcast(tensor, 0, name="looked at", out=out)
    hvd.broadcast(tensor, 0, name="looked at", out=out)


@on("ranks2")
def test_an_interrupt_where_the_profilers_span_of_a_repeated_call_ends_is_raised() -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    tensor = torch.ones(2)
    for _ in range(3):
        hvd.allreduce_(tensor, name="shown")
    with torch.profiler.profile(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_cache, "end_span", interrupt)
        with pytest.raises(KeyboardInterrupt):
            hvd.allreduce_(tensor, name="shown")
    assert not runtime.current().active_calls
    hvd.allreduce_(tensor, name="shown")
