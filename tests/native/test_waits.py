"""Waits: one call for submit, wait and release, several threads or requests at once, signals beside a stopped peer."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import ModuleType

import numpy as np
import pytest
from ranks import SUM, Group, Rank, context_of, describe, on_ranks, run_script, wait_for

from horo.core import context as _core
from horo.core import request_buffer
from horo.core.context import ffi, lib
from horo.errors import AbortedError, MismatchError, UnsupportedError, UsageError


def test_what_is_packed_by_hand_lies_where_the_compiler_expects_it() -> None:
    assert request_buffer._LONE_REQUEST.size == ffi.sizeof("horo_request")
    assert request_buffer._LONE_TENSOR.size == ffi.sizeof("horo_tensor")
    buffer = _core.RequestBuffer()
    buffer.set_name("name")
    tensor = _core.Tensor(1, 2, (3, 4), 5, 6, 7)
    numbers = {"reduce_op": 4, "root_rank": 5, "prescale": 0.5, "postscale": 0.25}
    for tensors in [[tensor], [tensor, tensor._replace(shape=()), tensor._replace(shape=(7,))]]:
        buffer.fill(2, tensors, sync=True, transient=True, into=True, **numbers)
        request = buffer.request
        assert request.flags == lib.HORO_SUBMIT_SYNC | lib.HORO_SUBMIT_TRANSIENT | lib.HORO_SUBMIT_INTO
        assert (ffi.string(request.name), request.op, request.tensor_count) == (b"name", 2, len(tensors))
        assert {name: getattr(request, name) for name in numbers} == numbers
        for index, expected in enumerate(tensors):
            packed = request.tensors[index]
            assert (int(ffi.cast("uintptr_t", packed.input)), int(ffi.cast("uintptr_t", packed.output))) == (1, 2)
            assert tuple(packed.shape[d] for d in range(packed.ndim)) == expected.shape
            assert (packed.dtype, packed.wire_dtype, packed.output_bytes) == (5, 6, 7)


@pytest.fixture
def uninterrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait comes back to look for signals."""
    monkeypatch.setattr(_core, "_SIGNAL_CHECK_MS", 60_000)


@pytest.mark.parametrize("spin_us", [0, 1000])
@pytest.mark.usefixtures("uninterrupted")  # after so long a wait the handle is left, too
@on_ranks([1], [2], [2, 1], "spin_us")
def test_a_result_goes_into_offered_memory(rank: Rank) -> None:
    """Else the handle of the request, which is done, is left, and the result is to be taken."""
    for turn, rows in enumerate([3, 4, 3, 0, 2]):  # of rank 0; the offer is for 3 rows of each
        mine = np.full((rows if rank.rank == 0 else 3, 2), 10 * turn + rank.rank, np.int32)
        wanted = np.concatenate([np.full((3 if r else rows, 2), 10 * turn + r) for r in range(rank.size)])
        output = np.full((3 * rank.size, 2), -1, np.int32)
        (tensor,) = describe([mine], [output])
        buffer = _core.RequestBuffer.of(_core.OPS["allgather"], "g", [tensor], sync=True, offers=True)
        rank.context.run(buffer)
        handle = buffer.last_handle[0]
        if rows == 3:
            assert handle == 0
            assert np.array_equal(output, wanted)
            continue
        data, first_dims = rank.context.take_result(handle, 0)
        assert first_dims == [rows] + [3] * (rank.size - 1)
        assert np.array_equal(np.frombuffer(data, np.int32).reshape(-1, 2), wanted)
        assert np.all(output == -1)
        rank.context.release(handle)
        with pytest.raises(UsageError):
            rank.context.poll(handle)


@pytest.mark.parametrize("check_ms", [0, 1])
@pytest.mark.parametrize("rows", [3, 4])
@on_ranks([3])
def test_a_wait_ended_early_goes_on_until_the_result(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, check_ms: int, rows: int
) -> None:
    """The way out and in again by which signal handlers run."""
    monkeypatch.setattr(_core, "_SIGNAL_CHECK_MS", check_ms)
    for turn in range(20):
        mine = np.full((rows, 2), 10 * turn + rank.rank, np.int32)
        output = np.full((3 * rank.size, 2), -1, np.int32)
        (tensor,) = describe([mine], [output])
        buffer = _core.RequestBuffer.of(_core.OPS["allgather"], "g", [tensor], sync=True, offers=True)
        rank.context.run(buffer)
        handle = buffer.last_handle[0]
        if handle:
            data, _ = rank.context.take_result(handle, 0)
            output = output if data is None else np.frombuffer(data, np.int32).reshape(-1, 2)
            rank.context.release(handle)
        assert np.array_equal(output, np.repeat(np.arange(rank.size) + 10 * turn, 2 * rows).reshape(-1, 2))
        rank.run("barrier", "b", [])
        ones = np.ones(3, np.float32)
        rank.run("allreduce", "x", [ones], reduce_op=SUM)
        assert np.all(ones == rank.size)


@on_ranks([2])
def test_what_run_refuses_leaves_nothing_behind(rank: Rank) -> None:
    good = np.ones(4, np.float32)
    with pytest.raises(UsageError, match="the name has 2000 bytes"):
        rank.run("allreduce", "n" * 2000, [good], reduce_op=SUM)
    with pytest.raises(UnsupportedError, match="65 dimensions"):
        lone = _core.Tensor(good.ctypes.data, good.ctypes.data, (1,) * 65, _core.DTYPES["float32"])
        rank.context.run(_core.RequestBuffer.of(_core.OPS["allreduce"], "deep", [lone], reduce_op=SUM, sync=True))
    with pytest.raises(MismatchError, match=r"float32 \[4\]"):
        rank.run("allreduce", "x", [np.ones(4 + rank.rank, np.float32)], reduce_op=SUM)
    rank.run("allreduce", "x", [good], reduce_op=SUM)  # the name is free again
    assert np.all(good == rank.size)
    handle = rank.submit("barrier", "last", [])
    rank.finish(handle)
    assert lib.horo_poll(rank.context._context, handle - 1) == lib.HORO_ERR_HANDLE  # the one before was released


WAITERS = 6


def begin(
    pool: ThreadPoolExecutor, rank: Rank, handle: int, calls: Sequence[Callable[[int], object]]
) -> list[Future[object]]:
    """Each in a thread of its own; returns once all wait in the core, which notes who has found the request."""
    known = len(rank.context.callers())
    begun = [pool.submit(call, handle) for call in calls]
    wait_for(lambda: len(rank.context.callers()) == known + len(begun))
    return begun


@pytest.mark.parametrize("way", ["wait", "finish", "wait_any", "release"])
@on_ranks([2], [1, 1])
def test_each_waiter_returns_when_the_request_is_done(rank: Rank, way: str) -> None:
    """And not when the next request is, in whose memory this one was: the other rank submits that later."""
    array = np.full(4, 1.0 + rank.rank)
    if rank.rank == 1:
        for name in "ab":
            rank.await_mark(f"may reduce {name}")
            rank.allreduce(array, name)
        return
    waiting = {"finish": rank.context.finish, "wait_any": lambda handle: rank.context.wait_any([handle, handle])}
    with ThreadPoolExecutor(WAITERS) as pool:
        handle = rank.submit("allreduce", "a", [array], reduce_op=SUM)
        waits = begin(pool, rank, handle, [waiting.get(way, rank.context.wait)] * WAITERS)
        rank.mark("may reduce a")
        if way == "release":
            wait_for(lambda: rank.context.release_if_done(handle))
        else:
            with suppress(UsageError):  # one that finishes may have released it
                rank.context.finish_or_keep(handle)
        following = rank.submit("allreduce", "b", [np.ones(4)], reduce_op=SUM)
        assert [wait.result(60) for wait in waits] == [None] * WAITERS
        assert array.tolist() == [3.0] * 4
        rank.mark("may reduce b")
        rank.finish(following)


@on_ranks([2], [1, 1])
def test_each_waiter_gets_the_sentence_of_the_error(rank: Rank) -> None:
    if rank.rank == 1:
        rank.await_mark("may reduce")
        with pytest.raises(MismatchError):
            rank.allreduce(np.ones(5), "x")
        return
    with ThreadPoolExecutor(WAITERS) as pool:
        handle = rank.submit("allreduce", "x", [np.ones(4)], reduce_op=SUM)
        waits = begin(pool, rank, handle, [rank.context.wait, rank.context.finish] * (WAITERS // 2))
        rank.mark("may reduce")
        outcomes = [wait.exception(60) for wait in waits]
    # One that finishes releases the handle: who comes only then, on a busy machine, waits for none.
    waited = [outcome for outcome in outcomes if type(outcome) is not UsageError]
    assert waited
    for outcome in waited:
        assert isinstance(outcome, MismatchError)
        assert "[4]" in str(outcome) and "[5]" in str(outcome)


@on_ranks([2])
def test_who_comes_after_the_release_is_told_so(rank: Rank) -> None:
    context = rank.context
    handle = rank.submit("barrier", "b", [])
    context.finish(handle)
    gone = f"Handle {handle} was not created or has been cleared."
    for call in (context.wait, context.finish, context.finish_or_keep, context.release, context.poll):
        with pytest.raises(UsageError, match=gone) as raised:
            call(handle)
        assert type(raised.value) is UsageError
        assert raised.value._is_released
    native = context._context
    assert lib.horo_wait(native, handle, 0, ffi.NULL, 0) == lib.HORO_ERR_HANDLE
    assert lib.horo_finish(native, handle, 0, ffi.NULL, 0) == lib.HORO_ERR_HANDLE
    assert lib.horo_release(native, handle) == lib.HORO_ERR_HANDLE
    context.wait_any([handle, handle])


@pytest.mark.usefixtures("uninterrupted")  # none calls again after the end
@on_ranks([2], [1, 1])
def test_an_end_of_the_context_lets_those_that_wait_return(rank: Rank) -> None:
    """One of them drives. The request is never submitted by the other rank."""
    if rank.rank == 1:
        rank.await_mark("is over")
        return
    with ThreadPoolExecutor(WAITERS) as pool:
        handle = rank.submit("allreduce", "x", [np.ones(4)], reduce_op=SUM)
        calls = [lambda handle: rank.context.wait_any([handle, handle]), *[rank.context.wait] * (WAITERS - 1)]
        waits = begin(pool, rank, handle, calls)
        rank.context.destroy()
        assert waits[0].result(60) is None
        assert [type(wait.exception(60)) for wait in waits[1:]] == [AbortedError] * (WAITERS - 1)
    rank.mark("is over")


LAYOUTS = [[2], [3], [1, 1], [2, 1]]


@pytest.mark.parametrize("first", [0, 1, 2])
@on_ranks(*LAYOUTS)
def test_it_ends_when_any_of_them_is_done(rank: Rank, first: int) -> None:
    """The other ranks submit one, and the rest only when the wait for it has ended."""
    if rank.rank == 0:
        handles = [rank.submit("allreduce", f"x{number}", [np.ones(9)], reduce_op=SUM) for number in range(3)]
        rank.context.wait_any(handles)
        assert [rank.context.in_progress(handle) for handle in handles] == [number != first for number in range(3)]
        rank.mark("has ended")
        rank.finish(*handles)
        return
    rank.allreduce(np.ones(9), f"x{first}")
    rank.await_mark("has ended")
    for number in {0, 1, 2} - {first}:
        rank.allreduce(np.ones(9), f"x{number}")


@on_ranks(*LAYOUTS)
def test_it_does_not_poll(rank: Rank) -> None:
    if rank.rank > 0:
        rank.await_mark("waits")
        until = time.monotonic() + 0.5
        wait_for(lambda: time.monotonic() > until)
        rank.allreduce(np.ones(9), "a")
        rank.allreduce(np.ones(9), "b")
        return
    handles = [rank.submit("allreduce", name, [np.ones(9)], reduce_op=SUM) for name in "ab"]
    before = rank.context.counters()["sleeps"]
    rank.mark("waits")
    rank.context.wait_any(handles)
    assert rank.context.counters()["sleeps"] - before < 50  # it was 250 with a look every 2 ms
    rank.finish(*handles)


def test_no_sleep_begins_without_a_look_behind_its_mark(native: ModuleType) -> None:
    """Whoever changes something before the mark is set wakes nobody."""
    with Group([1]) as group:
        context = context_of(native, Rank(group.contexts[0]))
        assert native.lib.shim_wait_looks_last(context, 5 * 10**9)
        assert native.lib.shim_wait_prepares_with_a_look(context)
        for by_kick in [False, True] * 20:  # what comes behind the last look of the thread, and wakes it
            assert native.lib.shim_drive_hears_late(context, by_kick, 20 * 10**9) == 1


@on_ranks([2])
def test_a_blocked_caller_waits_until_the_last_rank_comes_and_then_for_the_data(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "_SIGNAL_CHECK_MS", 1)  # the first rank calls again and again, and each call counts
    first = rank.group.contexts[0]
    if rank.rank == 1:
        wait_for(lambda: first.counters()["blocked_ns"] > 20_000_000)
        assert first.counters()["moved_ns"] == 0
    rank.allreduce(np.ones(1 << 20, np.float32))
    counters = rank.context.counters()
    assert 0 < counters["moved_ns"] <= counters["blocked_ns"]
    assert rank.rank == 1 or counters["blocked_ns"] > 20_000_000


HEAD = """
done = os.pipe()
rank, others = forked([2], segment_bytes=1 << 16, spin_us=0, stall_warning_ms=0)
me, child = rank.rank, others.get(1)
"""

STOPPED = """
data = np.ones(8 << 20, np.float32)
if me == 1:
    while True:
        rank.allreduce(data)
def reduce():
    if sys.argv[2] == "run":
        rank.run("allreduce", "x", [data], reduce_op=1)
    else:
        rank.allreduce(data, sync=True)
for _ in range(2):
    reduce()
begun, handled, calls = threading.Event(), threading.Event(), 0
def handle(*_):
    print("handled", flush=True)
    handled.set()
if sys.argv[1] == "handled":
    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
def signals():
    begun.wait()
    time.sleep(0.05)
    os.kill(child, signal.SIGSTOP)
    before = None
    while before != calls:  # until the main thread is in the call that does not end
        before = calls
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)
    if sys.argv[1] == "handled":
        handled.wait()
        os.kill(child, signal.SIGCONT)
        while calls < before + 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=signals, daemon=True).start()
try:
    begun.set()
    while True:
        reduce()
        calls += 1
except KeyboardInterrupt:
    print("interrupted", flush=True)
finally:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
rank.context.destroy()
print("destroyed", flush=True)
"""


@pytest.mark.parametrize("call", ["run", "submit"])
@pytest.mark.parametrize(("way", "said"), [("raise", []), ("handled", ["handled"])])
def test_ctrl_c_ends_a_wait_for_a_stopped_peer_unless_its_handler_returns(call: str, way: str, said: list[str]) -> None:
    assert run_script(HEAD + STOPPED, way, call).split() == [*said, "interrupted", "destroyed"]


HOLDING = """
# A thread of rank 0 keeps the interpreter's lock until rank 1 is done, as an extension does that computes without
# releasing it. Rank 1 stops for 1.5 s meanwhile, when the first segment has come and hundreds are due, so that rank 0's
# wait inside the operation lasts.
if me == 1 and os.fork() == 0:
    stopped = os.getppid()
    while open(f"/proc/{stopped}/stat").read().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    time.sleep(1.5)
    os.kill(stopped, signal.SIGCONT)
    os._exit(0)
data = np.ones(16 << 20, np.float32)
handle = rank.submit("allreduce", "x", [data], reduce_op=1)
while data[0] == 1:
    pass
if me == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
    rank.finish(handle)
    os.write(done[1], b"x")
    os._exit(0)
ended = ctypes.create_string_buffer(struct.pack("ihh", done[0], select.POLLIN, 0))
print(ctypes.PyDLL(None).poll(ended, 1, 30_000), flush=True)
rank.finish(handle)
os.waitpid(child, 0)
os._exit(0)
"""


def test_a_peer_does_not_wait_for_the_interpreter_of_a_rank_in_the_middle_of_an_operation() -> None:
    assert run_script(HEAD + HOLDING) == "1\n"
