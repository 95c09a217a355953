"""What torch's profiler shows of operations over horo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import on
from torch.profiler import ProfilerActivity, profile

from horo.errors import MismatchError


def events(profiler: Any) -> list[tuple[str, list[list[int]]]]:
    """The names of horo's events, in their order, with the shapes of the inputs."""
    found = [event for event in profiler.events() if event.name.startswith("horo:")]
    return [(each.name, each.input_shapes) for each in sorted(found, key=lambda each: each.time_range.start)]


@pytest.mark.parametrize("is_async", [False, True])
@on("group2")
def test_operations_have_torchs_names_and_the_shapes_of_their_inputs(is_async: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def call(begin: Any, *args: Any) -> None:
        work = begin(*args, async_op=is_async)
        assert work is None or work.wait()

    def run() -> None:
        call(dist.all_reduce, torch.ones(3, 2))
        call(dist.broadcast, torch.ones(4), 0)
        call(dist.all_gather, [torch.ones(5) for _ in range(size)], torch.ones(5))
        call(dist.all_to_all_single, torch.ones(2 * size), torch.ones(2 * size))
        call(dist.barrier)
        if rank == 0:
            dist.send(torch.ones(6), 1)
            dist.recv(torch.ones(7))
        else:
            dist.recv(torch.ones(6), 0)
            dist.send(torch.ones(7), 0)

    run()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
        run()
    pairs = ["send", "recvAnySource"] if rank == 0 else ["recv", "send"]
    want = [
        ("horo:all_reduce", [[3, 2]]),
        ("horo:broadcast", [[4]]),
        ("horo:all_gather", [[5]]),
        ("horo:all_to_all", [[2 * size]]),
        ("horo:barrier", []),
        (f"horo:{pairs[0]}", [[6]]),
        (f"horo:{pairs[1]}", [[7]]),
    ]
    assert events(profiler) == 2 * want
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        pass
    run()
    assert events(profiler) == []


@on("group2")
def test_an_operation_that_fails_is_an_event_too() -> None:
    rank = dist.get_rank()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with pytest.raises(MismatchError):
            dist.all_reduce(torch.ones(1 + rank))
        with pytest.raises(MismatchError):
            dist.all_reduce(torch.ones(1 + rank), async_op=True).wait()
        with pytest.raises(ValueError, match=r"the list 1 items"):
            dist.all_gather([torch.ones(1)], torch.ones(1))
    assert [name for name, _ in events(profiler)] == ["horo:all_reduce", "horo:all_reduce"]
