"""A rank that aborts: what is pending here fails at once, and nothing is waited for; for the other ranks it ends."""

import threading
import time

import numpy as np
import pytest
from ranks import Group, Rank, on_ranks, wait_for

from horo.core.context import Context
from horo.errors import AbortedError

WORDS = "the quorum has changed"


def abort_beside_waits(hosts: list[int]) -> float:
    """Rank 1 calls nothing, and reads nothing of the end before rank 0 is through with it; the seconds it takes."""
    said: list[str] = []

    def wait_for_one(context: Context, handle: int) -> None:
        with pytest.raises(AbortedError) as error:
            context.wait(handle)
        said.append(str(error.value))

    with Group(hosts, log_level=5) as group:
        rank = Rank(group.contexts[0], group.links)
        context = rank.context
        handles = [rank.submit("allreduce", f"x{i}", [np.ones(5)], reduce_op=1) for i in range(3)]
        waits = [threading.Thread(target=wait_for_one, args=(context, handle)) for handle in handles]
        waits.append(threading.Thread(target=context.wait_any, args=(handles,)))
        for wait in waits:
            wait.start()
        wait_for(lambda: len(context.callers()) == 5)
        began = time.monotonic()
        context.abort(WORDS)
        took = time.monotonic() - began
        for wait in waits:
            wait.join(20)
        assert len(said) == 3
        assert all(text.startswith(f"this rank has aborted the group: {WORDS}; pending here: 'x0', ") for text in said)
        assert all(not context.in_progress(handle) for handle in handles)
        with pytest.raises(AbortedError, match=WORDS):
            rank.barrier("later")
        context.abort("once more")
        assert str(context.health()) == f"this rank has aborted the group: {WORDS}"
        return took


@pytest.mark.parametrize("hosts", [[2], [1, 1]], ids=str)
def test_it_returns_at_once_while_other_threads_wait_in_all_ways(hosts: list[int]) -> None:
    assert min(abort_beside_waits(hosts) for _ in range(5)) < 0.5  # of a thread that a busy machine holds up once


@on_ranks([2], times=10, log_level=5)
def test_many_aborts_beside_calls_of_other_threads(rank: Rank) -> None:
    """In whatever a thread is, it gets the error or its result."""

    def call_on(number: int) -> None:
        with pytest.raises(AbortedError, match=r"has aborted the group|shutting down"):
            while True:
                rank.run("allreduce", f"x{number}", [np.ones(100)], reduce_op=1)

    calls = [threading.Thread(target=call_on, args=(number,)) for number in range(3)]
    for call in calls:
        call.start()
    if rank.rank == 0:
        wait_for(lambda: rank.context.counters()["tensors"] > 5)
        rank.context.abort(WORDS)
    for call in calls:
        call.join(30)
        assert not call.is_alive()
