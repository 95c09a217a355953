"""What ranks note of their work: in which order, under which threads, and when they show it."""

import os
import time

import numpy as np
import pytest
from ranks import Group, Rank, Written, on_ranks

from horo.core.context import Event
from horo.errors import AbortedError, UsageError


def of(rank: Rank, name: str) -> list[Event]:
    return [event for event in rank.context.events() if event.name == name]


@on_ranks([2], [1, 1], [2, 1])
def test_a_rank_notes_each_step_of_an_allreduce_in_order(rank: Rank) -> None:
    begin_ns = time.monotonic_ns()
    rank.allreduce(np.ones(1000, np.float32), "x")
    end_ns = time.monotonic_ns()
    events = of(rank, "x")
    assert [event.event for event in events] == ["submitted", "agreed", "begun", "ended"]
    assert {(event.op, event.bytes, event.team, event.status) for event in events} == {("allreduce", 4000, 0, "")}
    assert [event.number for event in events] == [0, 0, 1, 0]
    times = [event.time_ns for event in events]
    assert times == sorted(times)
    slack_ns = 20_000_000  # the clocks have been compared for a moment only
    assert begin_ns - slack_ns < times[0]
    assert times[-1] < end_ns + slack_ns


@on_ranks([2])
def test_a_batch_is_noted_with_what_shares_it(rank: Rank) -> None:
    handles = [rank.submit("allreduce", f"g{i}", [np.ones(10)], reduce_op=1) for i in range(20)]
    rank.finish(*handles)
    events = rank.context.events()
    batches = [event for event in events if event.event == "begun"]
    assert sum(batch.number for batch in batches) == 20
    assert sum(batch.bytes for batch in batches) == 20 * 80
    for step in ("submitted", "agreed", "ended"):
        assert sorted(event.name for event in events if event.event == step) == sorted(f"g{i}" for i in range(20))


@on_ranks([1, 2], stall_warning_ms=60_000)
def test_a_shutdown_shows_nothing(rank: Rank, written: Written) -> None:
    rank.allreduce(np.ones(3), "done")
    if rank.rank == 2:
        rank.group.leave(2)
        return
    with pytest.raises(AbortedError):
        rank.allreduce(np.ones(3), "late")
    assert rank.context.events()[-1][1:] == ("left", "", "", 0, 0, 2, "")
    assert written() == ""


def test_events_are_refused_in_a_forked_child_and_after_the_end() -> None:
    with Group([1]) as group:
        context = group.contexts[0]
        Rank(context).barrier()
        assert len(context.events()) == 4
        child = os.fork()
        if child == 0:
            try:
                context.events()
            except UsageError as error:
                os._exit(0 if "forked" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(UsageError, match="shut down"):
        context.events()
