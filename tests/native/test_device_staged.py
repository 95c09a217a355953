"""Tensors on a GPU go through pinned host memory. A double of the driver stands for it, whose memory no processor may
touch: one that does ends the process.
"""

from collections.abc import Callable

import numpy as np
import pytest
from device_group import Gpu, Nccl, OnGpu
from ranks import SUM, Group, Rank, describe, on_ranks

from horo.core import context
from horo.core.libraries import copy_back
from horo.errors import GroupError, ResourceError, UsageError

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
    own.close()
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
    own.close()


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
    own.close()


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
    own.close()
    gpu.close(captured)


def test_a_rank_that_leaves_while_values_are_on_their_way_waits_for_the_driver(gpu: Gpu) -> None:
    gates = []

    def body(rank: Rank) -> OnGpu:
        own = OnGpu(rank, gpu)
        gates.append(gpu.hold_stream(own.stream))
        own.submit("allreduce", "x", np.ones(4, np.float32), reduce_op=1)
        return own

    group = Group((2,))
    owners = group.run(body)
    group.destroy_while(lambda: gpu.open(*gates))
    for own in owners:
        own.close()


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
    own.close()
