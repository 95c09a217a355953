"""A GPU that fails is noticed, and told, also where its program does not wait for what was on its way to the host."""

import re
from typing import Any

import numpy as np
import pytest
from device_group import Gpu, OnGpu
from ranks import SUM, Group, Rank, describe, on_ranks, wait_for

from horo.core import context as _core
from horo.errors import GroupError, HoroError, ResourceError

REASON = "the copy from the GPU failed with code 719: unspecified launch failure"
LOST = "an error on GPU 0 that lost the values of allreduce"
REFUSED = rf"rank 2 \(.*\) has refused it: {REASON}"
HOSTS = (2, 1)
OPTIONS: dict[str, dict[str, Any]] = {"allreduce": {"reduce_op": SUM}, "broadcast": {"root_rank": 2}, "allgather": {}}
STALLS = {"stall_warning_ms": 5000, "stall_shutdown_ms": 20_000}
"""A rank that is not told of the failure gets another error, in the end."""


def submit(own: OnGpu, op: str, name: str, length: int, count: int = 1, **options: Any) -> int:
    """A request of rank 2 on its GPU."""
    array = np.ones(length, np.float32)
    (tensor,) = describe([array], [array])
    tensors = [tensor._replace(input=own.gpu.put(array), output=own.gpu.put(array)) for _ in range(count)]
    options = {**OPTIONS[op], "device": own.device + 1, "stream": own.stream, **options}
    return own.context.submit(_core.RequestBuffer.of(_core.OPS[op], name, tensors, **options))


def fails(rank: Rank, handle: int, kind: type[HoroError], reason: str) -> None:
    with pytest.raises(kind, match=reason):
        rank.context.wait(handle)
    rank.context.release(handle)


@pytest.mark.parametrize("way", ["wait", "wait_any", "poll", "submit", "nothing"])
@pytest.mark.parametrize("what", ["allreduce", "broadcast", "allgather", "group", "set"])
@on_ranks(HOSTS, **STALLS)
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
        own.close()
    elif team == 0 or rank.rank == 1:
        arrays = [np.ones(length, np.float32)] * count
        names = ["x0", "x1", *(["x2"] if way == "submit" else [])]
        for handle in [rank.submit(op, name, arrays, team=team, **OPTIONS[op]) for name in names]:
            fails(rank, handle, ResourceError, REFUSED)
        if rank.rank == 1:
            rank.mark("are told")
    assert rank.allreduce(np.ones(2), "after").tolist() == [3, 3]


@on_ranks(HOSTS, **STALLS)
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
        own.close()
        return
    rank.await_mark("has joined")
    with pytest.raises(GroupError, match=f"ended with {LOST} 'x0': {REASON}"):
        rank.allreduce(np.ones(100, np.float32), "x0")


def test_a_rank_that_leaves_behind_a_failure_ends_nothing(gpu: Gpu) -> None:
    def body(rank: Rank) -> OnGpu | None:
        if rank.rank != 2:
            return None
        own = OnGpu(rank, gpu)
        gpu.is_broken = True
        gpu.fail_staging(1)
        submit(own, "allreduce", "x0", 100)
        return own

    group = Group(HOSTS)
    own = group.run(body)[2]
    group.leave(2)
    for context in group.contexts[:2]:
        wait_for(lambda context=context: context.health() is not None)  # type: ignore[misc]
        assert re.match(r"rank 2 \(.*\) has shut horo down", str(context.health()))
    group.destroy()
    assert own is not None
    own.close()
