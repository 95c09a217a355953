"""Tensors on a GPU go through pinned host memory: order of streams, what is let go of when, and failures of the GPU;
libraries for GPUs are found where they are, and of each that is of no use the reason is told.

A double of the driver stands for it, whose memory no processor may touch: one that does ends the process.
"""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from device_group import Gpu, Nccl, OnGpu
from doubles import CUDA, NCCL, build_double
from ranks import SUM, Group, Rank, describe, on_ranks, recorded_stderr, run_ranks, run_script, wait_for

from horo.core import context
from horo.core.libraries import copy_back
from horo.errors import GroupError, HoroError, ResourceError, UsageError

HOSTS = [(2,), (1, 1), (2, 1)]


@pytest.mark.parametrize("length", [0, 1, 1000, 300_001])
@pytest.mark.parametrize("default_stream", [False, True])
@on_ranks(*HOSTS)
def test_values_are_taken_behind_the_programs_work_and_it_goes_on_behind_the_result(
    rank: Rank, gpu: Gpu, length: int, default_stream: bool
) -> None:
    own = OnGpu(rank, gpu, default_stream=default_stream)
    array = np.full(length, rank.rank, np.float32)
    gate = gpu.hold_stream(own.stream)
    handle, source, target = own.submit("allreduce", "x", array, reduce_op=SUM)
    assert not rank.context.poll(handle)
    gpu.open(gate)
    own.finish(handle)
    gpu.add_floats(own.stream, target, array.nbytes, 0.5)
    again, _, _ = own.submit("allreduce", "barrier", np.zeros(1, np.float32), reduce_op=1)
    own.finish(again)
    gpu.synchronize(own.stream)
    np.testing.assert_array_equal(gpu.get(source, array), np.full(length, rank.size * (rank.size - 1) / 2 + 0.5))


@on_ranks((1,))
def test_bad_calls_are_refused_with_a_sentence_and_change_nothing(rank: Rank, gpu: Gpu) -> None:
    array = np.ones(4, np.float32)
    (tensor,) = describe([array], [array])
    request = context.RequestBuffer.of(context.OPS["allreduce"], "x", [tensor], reduce_op=1, device=1)
    with pytest.raises(UsageError, match="horo_use_cuda has not been called"):
        rank.context.submit(request)
    own = OnGpu(rank, gpu)
    with pytest.raises(UsageError, match="there is no device 8; this process sees 8"):
        own.submit("allreduce", "x", array, device=9)
    gpu.limit_pinned(0)
    with pytest.raises(ResourceError, match=r"'x': no 64 bytes of pinned memory: cuMemHostAlloc failed with code 2"):
        own.submit("allreduce", "x", array)
    gpu.limit_pinned()
    handle, _, _ = own.submit("allreduce", "x", array, reduce_op=1)
    own.context.wait(handle)
    copy_back(own.context, handle, own.stream)
    copy_back(own.context, handle, 0)  # another stream waits, too
    own.context.release(handle)
    with pytest.raises(UsageError, match="has no tensors on a GPU"):
        copy_back(own.context, handle, own.stream)
    np.testing.assert_array_equal(own.allreduce(array), array)


@pytest.mark.parametrize("way", ["staged", "nccl"])
@on_ranks((2,))
def test_neither_values_nor_results_pass_a_stream_that_is_captured(rank: Rank, gpu: Gpu, nccl: Nccl, way: str) -> None:
    """Each call is refused, which leaves the capture whole, and may be made again."""
    own = OnGpu(rank, gpu, [nccl.path] if way == "nccl" else None, device=rank.rank)
    array = np.ones(10, np.float32)

    def refuses(call: Callable[[], object]) -> None:
        gpu.capture(own.stream, True)
        with pytest.raises(UsageError, match="the current stream is being captured into a CUDA graph"):
            call()
        assert gpu.capture(own.stream, False) == 0

    for turn in range(2):
        rank.barrier()
        if rank.rank == turn:
            refuses(lambda: own.submit("allreduce", "refused", array, reduce_op=SUM))
        else:
            refusal = own.submit("allreduce", "refused", array, reduce_op=SUM)[0]
            with pytest.raises(UsageError, match="has refused it"):
                own.context.wait(refusal)
            own.context.release(refusal)
        handle, source, _ = own.submit("allreduce", "x", array, reduce_op=SUM)
        own.context.wait(handle)
        rank.barrier()
        if rank.rank == turn:
            refuses(lambda handle=handle: copy_back(own.context, handle, own.stream))  # type: ignore[misc]
            copy_back(own.context, handle, own.stream)
            refuses(lambda handle=handle: copy_back(own.context, handle, own.stream))  # type: ignore[misc]
        rank.barrier()
        own.finish(handle)
        gpu.synchronize(own.stream)
        np.testing.assert_array_equal(gpu.get(source, array), array * 2)


@on_ranks((2,))
def test_a_graph_that_is_captured_meanwhile_stays_whole(rank: Rank, gpu: Gpu) -> None:
    """The program captures on a stream of its own, in the mode in which any other call ends the capture."""
    own, captured = OnGpu(rank, gpu), gpu.make_stream()
    rank.barrier()
    if rank.rank == 0:
        gpu.capture(captured, True)
    rank.barrier()
    for size in (10, 100_000, 10):  # horo opens the device, and takes memory, now
        handle, _, _ = own.submit("allreduce", f"x{size}", np.ones(size, np.float32), reduce_op=1)
        own.finish(handle)
    rank.barrier()
    if rank.rank == 0:
        assert gpu.capture(captured, False) == 0
    rank.barrier()


def test_a_rank_that_leaves_while_values_are_on_their_way_waits_for_the_driver(gpu: Gpu) -> None:
    gates = []

    def body(rank: Rank) -> None:
        own = OnGpu(rank, gpu)
        gates.append(gpu.hold_stream(own.stream))
        own.submit("allreduce", "x", np.ones(4, np.float32), reduce_op=1)

    group = Group((2,))
    group.run(body)
    group.destroy_while(lambda: gpu.open(*gates))


@on_ranks((2,))
def test_a_loss_ends_requests_whose_values_are_still_on_their_way(rank: Rank, gpu: Gpu) -> None:
    """Such a request has not been announced; its values come when nobody wants them any more."""
    own = OnGpu(rank, gpu)
    if rank.rank == 1:
        rank.await_mark("submitted")
        rank.context.end("ValueError: bad batch")
    else:
        gate = gpu.hold_stream(own.stream)
        handle, _, _ = own.submit("allreduce", "x", np.ones(4, np.float32), reduce_op=1)
        rank.mark("submitted")
        with pytest.raises(GroupError, match="bad batch"):
            own.context.wait(handle)
        with pytest.raises(UsageError, match="has no results for the GPU: it is not done, or has failed"):
            copy_back(own.context, handle, own.stream)
        own.context.release(handle)
        gpu.open(gate)
        gpu.synchronize(own.stream)


@on_ranks((1,))
def test_pinned_memory_is_used_again(rank: Rank, gpu: Gpu) -> None:
    own = OnGpu(rank, gpu)
    for _ in range(3):
        handles = [own.submit("allreduce", f"x{i}", np.ones(5, np.float32), reduce_op=SUM)[0] for i in range(4)]
        for handle in handles:
            own.context.wait(handle)
            copy_back(own.context, handle, own.stream)
        gpu.synchronize(own.stream)
        for handle in handles:
            own.context.release(handle)
    assert gpu.counts()["pinned"] == 4


def test_what_the_default_stream_stands_in_front_of_goes_when_that_goes_on(gpu: Gpu) -> None:
    """However long that takes, and with as little on the stream: a mark, whose event is the second."""
    gates = []

    def body(rank: Rank) -> None:
        own = OnGpu(rank, gpu)
        np.testing.assert_array_equal(own.allreduce(np.full(5, 3, np.int32), op="average"), [3] * 5)
        assert gpu.counts()["pinned"] == 1
        gpu.await_program()
        gates.append(gpu.hold_stream(0))

    with recorded_stderr():
        run_ranks(body, (1,))
    counts = gpu.counts()
    assert [counts[name] for name in ("pinned", "contexts", "events")] == [1, 1, 2]
    gpu.open(*gates)
    wait_for(lambda: gpu.counts()["contexts"] == 0)


THOUSAND = np.arange(1000, dtype=np.float32)
INVALID_VALUE = 1


@pytest.mark.parametrize("code", [0, INVALID_VALUE])
@on_ranks((1,))
def test_a_staged_request_may_be_released_while_its_results_go_back(rank: Rank, gpu: Gpu, code: int) -> None:
    own = OnGpu(rank, gpu)
    handle, _, target = own.submit("allreduce", "x", THOUSAND, reduce_op=SUM)
    own.context.wait(handle)
    gate = gpu.pause()
    with ThreadPoolExecutor() as pool:
        taken = pool.submit(copy_back, own.context, handle, own.stream)
        gpu.await_pause(gate)
        own.context.release(handle)
        gpu.resume(gate, code)
        with pytest.raises(ResourceError, match="cuStreamWaitEvent failed with code 1") if code else nullcontext():
            taken.result(60)
    gpu.synchronize(own.stream)
    np.testing.assert_array_equal(gpu.get(target, THOUSAND), THOUSAND)


@on_ranks((1,))
def test_a_second_thread_that_takes_results_waits_for_the_first_to_begin_their_copy(rank: Rank, gpu: Gpu) -> None:
    own = OnGpu(rank, gpu)
    other = gpu.make_stream()
    handle, _, target = own.submit("allreduce", "x", THOUSAND, reduce_op=context.REDUCE_OPS["average"], postscale=2.0)
    own.context.wait(handle)

    def take_second() -> np.ndarray:
        copy_back(own.context, handle, other)
        gpu.synchronize(other)
        return gpu.get(target, THOUSAND)

    gate = gpu.pause()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(copy_back, own.context, handle, own.stream)
        gpu.await_pause(gate)
        second = pool.submit(take_second)
        wait([second], 0.3)  # by then it would have read what is not there yet
        gpu.resume(gate)
        first.result(60)
        np.testing.assert_array_equal(second.result(60), 2 * THOUSAND)
    own.context.release(handle)


REASON = "the copy from the GPU failed with code 719: unspecified launch failure"
LOST = "an error on GPU 0 that lost the values of allreduce"
REFUSED = rf"rank 2 \(.*\) has refused it: {REASON}"
OPTIONS: dict[str, dict[str, Any]] = {"allreduce": {"reduce_op": SUM}, "broadcast": {"root_rank": 2}, "allgather": {}}
STALLS = {"stall_warning_ms": 5000, "stall_shutdown_ms": 20_000}
"""A rank that is not told of the failure gets another error, in the end."""


def submit(own: OnGpu, op: str, name: str, length: int, count: int = 1, **options: Any) -> int:
    """A request of rank 2 on its GPU."""
    array = np.ones(length, np.float32)
    (tensor,) = describe([array], [array])
    tensors = [tensor._replace(input=own.gpu.put(array), output=own.gpu.put(array)) for _ in range(count)]
    options = {**OPTIONS[op], "device": own.device + 1, "stream": own.stream, **options}
    return own.context.submit(context.RequestBuffer.of(context.OPS[op], name, tensors, **options))


def fails(rank: Rank, handle: int, kind: type[HoroError], reason: str) -> None:
    with pytest.raises(kind, match=reason):
        rank.context.wait(handle)
    rank.context.release(handle)


@pytest.mark.parametrize("way", ["wait", "wait_any", "poll", "submit", "nothing"])
@pytest.mark.parametrize("what", ["allreduce", "broadcast", "allgather", "group", "set"])
@on_ranks((2, 1), **STALLS)
def test_all_ranks_are_told_of_each_request_whose_values_do_not_come(
    rank: Rank, gpu: Gpu, *, what: str, way: str
) -> None:
    """Rank 2 looks after the second of two requests only, or after none."""
    op = what if what in OPTIONS else "allreduce"
    length, count = 100, 3 if what == "group" else 1
    team = rank.add_team([1, 2]) if what == "set" else 0
    if rank.rank == 2:
        own = OnGpu(rank, gpu)
        gpu.is_broken = True
        gpu.fail_staging(1)
        handles = [submit(own, op, name, length, count, team=team) for name in ("x0", "x1")]
        if way == "wait":
            fails(rank, handles[1], ResourceError, REASON)
        elif way == "wait_any":
            rank.context.wait_any([handles[1], handles[1]])
            fails(rank, handles[1], ResourceError, REASON)
        elif way == "poll":
            wait_for(lambda: rank.context.poll(handles[1]))
        elif way == "submit":
            handles.append(submit(own, op, "x2", length, count, team=team))
        rank.await_mark("are told", timeout_s=30)
    elif team == 0 or rank.rank == 1:
        arrays = [np.ones(length, np.float32)] * count
        names = ["x0", "x1", *(["x2"] if way == "submit" else [])]
        for handle in [rank.submit(op, name, arrays, team=team, **OPTIONS[op]) for name in names]:
            fails(rank, handle, ResourceError, REFUSED)
        if rank.rank == 1:
            rank.mark("are told")
    assert rank.allreduce(np.ones(2), "after").tolist() == [3, 3]


@on_ranks((2, 1), **STALLS)
def test_a_rank_that_joins_behind_a_failure_stands_in_for_nothing_before(rank: Rank, gpu: Gpu) -> None:
    """The others wait for what the rank has called itself; its failure cannot be told in the name's place any more."""
    if rank.rank == 2:
        own = OnGpu(rank, gpu)
        gpu.is_broken = True
        gpu.let_copies(0)
        gpu.fail_staging(1)
        submit(own, "allreduce", "x0", 100)
        rank.context.start_join(0)
        gpu.let_copies(-1)
        rank.mark("has joined")
        wait_for(lambda: rank.context.health() is not None)
        return
    rank.await_mark("has joined")
    with pytest.raises(GroupError, match=f"ended with {LOST} 'x0': {REASON}"):
        rank.allreduce(np.ones(100, np.float32), "x0")


def test_a_rank_that_leaves_behind_a_failure_ends_nothing(gpu: Gpu) -> None:
    def body(rank: Rank) -> None:
        own = OnGpu(rank, gpu)
        gpu.is_broken = True
        gpu.fail_staging(1)
        submit(own, "allreduce", "x0", 100)

    group = Group((2, 1))
    group.run(body, ranks=[2])
    group.leave(2)
    for other in group.contexts[:2]:
        wait_for(lambda other=other: other.health() is not None)  # type: ignore[misc]
        assert re.match(r"rank 2 \(.*\) has shut horo down", str(other.health()))
    group.destroy()


class Found(NamedTuple):
    status: int
    name: str
    version: int
    devices: int
    path: str
    sentence: str


Find = Callable[..., Found]
_numbers = count()


@pytest.fixture
def find(native: ModuleType) -> Find:
    """Calls ``horo_find_library``."""

    def call(library: str, paths: list[Path | str], *, initializes: bool = False) -> Found:
        ffi, lib = native.ffi, native.lib
        kind = lib.HORO_LIBRARY_CUDA if library == CUDA else lib.HORO_LIBRARY_NCCL
        names = [ffi.new("char[]", str(path).encode()) for path in paths]
        found, error = ffi.new("horo_library *"), ffi.new("char[]", lib.HORO_MESSAGE_MAX)
        status = lib.horo_find_library(
            kind, ffi.new("char *[]", names), len(names), initializes, found, error, lib.HORO_MESSAGE_MAX
        )
        texts = [ffi.string(part).decode() for part in (found.name, found.path, error)]
        return Found(status, texts[0], found.version, found.device_count, texts[1], texts[2])

    return call


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Builds a double in a folder of its own, under a name of its own, so that no test finds that of another."""

    def build(library: str, **defines: int) -> Path:
        number = next(_numbers)
        return build_double(library, tmp_path / str(number), soname=f"double-{number}.so", **defines)

    return build


def test_a_library_is_found_with_its_version_and_place(find: Find, make: Any) -> None:
    """The driver is initialized only where that is wanted."""
    driver, nccl, old = make(CUDA, DEVICES=8, VERSION=13000), make(NCCL), make(NCCL, VERSION=21801)
    assert find(CUDA, [driver]) == Found(0, "CUDA driver 13.0", 13000, -1, str(driver), "")
    assert find(CUDA, [driver], initializes=True) == Found(0, "CUDA driver 13.0", 13000, 8, str(driver), "")
    assert find(NCCL, [nccl]) == Found(0, "NCCL 2.23.4", 22304, -1, str(nccl), "")
    assert find(NCCL, [old]).name == "NCCL 2.18.1"


def test_a_driver_that_cannot_be_initialized_says_why(find: Find, make: Any) -> None:
    path = make(CUDA, INIT_CODE=100)
    found = find(CUDA, [path], initializes=True)
    assert found.status == -20
    assert found.sentence == (
        f"CUDA driver 12.4 ({path}) cannot be used: cuInit failed with code 100: no CUDA-capable device is detected"
    )
    other = find(CUDA, [make(CUDA, INIT_CODE=999)], initializes=True)
    assert other.sentence.endswith("cuInit failed with code 999: the driver has no text for it")


@pytest.mark.parametrize(
    ("library", "defines", "reason"),
    [
        (CUDA, {"LACKS_INIT": 1}, "{} lacks cuInit"),
        (CUDA, {"VERSION": 11030}, "{} is CUDA driver 11.3; horo needs 11.4"),
        (CUDA, {"VERSION_CODE": 34}, "{} cuDriverGetVersion failed with code 34: the driver has no text for it"),
        (NCCL, {"VERSION": 21707}, "{} is NCCL 2.17.7; horo needs 2.18.1"),
        (NCCL, {"VERSION_CODE": 2}, "{} ncclGetVersion failed with code 2: unhandled system error"),
    ],
)
def test_a_useless_library_says_why(find: Find, make: Any, library: str, defines: dict[str, int], reason: str) -> None:
    path = make(library, **defines)
    what = "CUDA driver" if library == CUDA else "NCCL"
    found = find(library, [path])
    assert (found.status, found.sentence) == (-20, f"no usable {what}: {reason.format(path)}")


def test_the_first_place_of_use_is_taken_and_all_others_give_their_reason(find: Find, make: Any) -> None:
    old, bare = make(NCCL, VERSION=20000), make(CUDA)
    good, later = make(NCCL), make(NCCL, VERSION=22400)
    assert find(NCCL, [old, bare, good, later]).path == str(good)
    found = find(NCCL, ["/nowhere/libnccl.so.2", old, bare])
    assert found.sentence.startswith("no usable NCCL: /nowhere/libnccl.so.2: cannot open shared object file")
    assert found.sentence.endswith(f"; {old} is NCCL 2.0.0; horo needs 2.18.1; {bare} lacks ncclGetVersion")


def test_what_is_no_library_is_told_and_reasons_that_do_not_fit_are_cut(find: Find, tmp_path: Path) -> None:
    text = tmp_path / "libnccl.so.2"
    text.write_text("no library")
    assert f"{text}: " in find(NCCL, [text]).sentence
    assert find(NCCL, []).sentence == "no usable NCCL: there is no place to look for it"
    sentence = find(CUDA, [f"/nowhere/{number}/{'x' * 200}" for number in range(20)]).sentence
    assert len(sentence) == 1023
    assert sentence.startswith("no usable CUDA driver: /nowhere/0/")


LOADED_FIRST = """
import ctypes, sys
import native_build
loaded, other = sys.argv[1:]
ctypes.CDLL(loaded)
native = native_build.load()
ffi, lib = native.ffi, native.lib
for paths in (["", other], [""], [other]):
    names = [ffi.new("char[]", path.encode()) for path in paths]
    found, error = ffi.new("horo_library *"), ffi.new("char[]", 1024)
    assert lib.horo_find_library(1, ffi.new("char *[]", names), len(names), 0, found, error, 1024) == 0
    print(ffi.string(found.name).decode(), ffi.string(found.path).decode())
"""


@pytest.mark.usefixtures("native")  # built, so that the time limit is for running only
def test_what_is_in_the_process_already_is_taken_where_that_is_wanted(tmp_path: Path) -> None:
    loaded = build_double(NCCL, tmp_path / "loaded", VERSION=22222)
    other = build_double(NCCL, tmp_path / "other")
    said = run_script(LOADED_FIRST, loaded, other)  # in a process of its own, which keeps that library
    assert said.splitlines() == [f"NCCL 2.22.22 {loaded}"] * 2 + [f"NCCL 2.23.4 {other}"]
