"""The background thread of a rank that other hosts need leaves the driving to callers, and serves when none come."""

import select
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest
import wire_oracle as oracle
from fabric import close_setup, make_setups
from ranks import SUM, Rank, on_ranks, wait_for

from horo.core import context
from horo.core.context import Context

CALLS, TURNS, LIMIT_S = 20, 15, 30


@pytest.mark.parametrize("late_s", [0, 0.01], ids=["stream", "long-call"])
@on_ranks([1, 1], [2, 1], [1, 1, 1])
def test_others_are_served_when_the_caller_stops_calling(rank: Rank, late_s: float) -> None:
    """After a stream of calls, or one that lasted so long that the thread no longer looks by itself meanwhile."""
    ones = np.ones(4, np.float32)
    for turn in range(TURNS):
        for _ in range(CALLS):
            ones[:] = 1
            rank.run("allreduce", "stream", [ones], reduce_op=SUM)
            assert np.all(ones == rank.size)
        if rank.rank > 0:
            time.sleep(late_s)
        rank.run("barrier", "last", [])
        # Nobody is woken for this one, and rank 0, which leads the agreement, does not wait for it.
        handle = rank.submit("barrier", "between", [], sync=True)
        if rank.rank == 0:
            rank.await_mark(("served", turn))
        rank.finish(handle)
        rank.mark(("served", turn))


@on_ranks([1], [2], [1, 1])
def test_who_only_asks_by_waits_of_no_time_gets_an_answer(rank: Rank) -> None:
    """Of a request that its caller would drive if it waited."""
    for _ in range(3):
        handle = rank.submit("barrier", "x", [], sync=True)
        wait_for(
            lambda handle=handle: (
                context.lib.horo_wait(rank.context._context, handle, 0, context.ffi.NULL, 0) == context.lib.HORO_OK
            )
        )
        rank.finish(handle)


@on_ranks([1, 1])
def test_the_thread_sleeps_while_a_call_waits(rank: Rank) -> None:
    """It looks after a call that has just begun; then the caller wakes it."""
    late_s = 0.3
    rank.run("barrier", "first", [])
    before = rank.context.counters()["sleeps"]
    if rank.rank == 1:
        time.sleep(late_s)
    rank.run("barrier", "second", [])
    assert rank.context.counters()["sleeps"] - before < 1000 * late_s / 4


@on_ranks([1, 1])
def test_a_caller_finds_an_idle_leader_ready_to_be_driven(rank: Rank) -> None:
    """Nobody is woken for its call: the thread sleeps without holding the driving."""
    team = [rank.context.add_team([member]) for member in range(2)][rank.rank]
    wakes = []
    for turn in range(7):
        rank.barrier()
        time.sleep(0.01 * 2**turn)  # until nobody looks any more, which on a busy machine takes a while
        before = rank.context.counters()["wakes"]
        handle = rank.submit("barrier", "alone", [], team=team, sync=True)
        wakes.append(rank.context.counters()["wakes"] - before)
        rank.finish(handle)
    assert min(wakes) == 0  # of the first the thread may still be awake


class Child:
    """Rank 1 on a host of its own, played by the test: what it has been sent can be seen without a thread of its."""

    def __init__(self) -> None:
        mine, self._setup = make_setups([1, 1], cache_capacity=4)
        self._control, self._data = (
            socket.socket(fileno=fds[0]) for fds in (self._setup.control_fds, self._setup.data_fds)
        )
        for link in (self._control, self._data):
            link.setblocking(True)
            link.settimeout(LIMIT_S)
        self._received = b""
        self._answers = 0
        self.rank = Rank(Context(mine))

    def send(self, message: bytes) -> None:
        self._control.sendall(oracle.framed(message))

    def count_answers(self) -> int:
        """So far, of any kind; does not wait."""
        while select.select([self._control], [], [], 0)[0]:
            self._received += self._control.recv(1 << 16)
        while len(self._received) >= 4 and (end := 4 + int.from_bytes(self._received[:4], "little")) <= len(
            self._received
        ):
            self._received = self._received[end:]
            self._answers += 1
        return self._answers

    def exchange(self, data: bytes) -> bytes:
        self._data.sendall(data)
        return self._data.recv(len(data), socket.MSG_WAITALL)

    def close(self) -> None:
        for link in (self._control, self._data):
            link.detach()
        close_setup(self._setup)
        self.rank.context.destroy()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    try:
        yield child
    finally:
        child.close()


def count_late(child: Child, op: str, arrays: list[np.ndarray], announcement: bytes) -> int:
    """How many of 200 calls of rank 0 return before what the other host waits for has been sent."""
    late, before = 0, child.count_answers()
    for step in range(200):
        child.send(announcement)
        child.rank.run(op, "x", arrays, reduce_op=SUM if arrays else 0)
        late += child.count_answers() - before < step + 1
    return late


ONE = b"\0\0\x80?"
"""As a float32."""


def test_a_caller_that_returns_has_sent_the_record_that_others_wait_for(child: Child) -> None:
    """It may compute for long now."""
    child.send(oracle.request_message(1, 0, b"", oracle.request(oracle.Request("x", op=oracle.BARRIER))))
    child.rank.run("barrier", "x", [])
    wait_for(lambda: child.count_answers() == 1)
    assert count_late(child, "barrier", [], oracle.ids_message([4])) == 0


def test_a_caller_that_returns_has_sent_the_result_that_others_wait_for(child: Child) -> None:
    """The same of what a record carries."""
    array = np.ones(1, np.float32)
    request = oracle.Request("x", reduce_op=SUM, tensors=(oracle.Tensor(7, (1,)),))
    child.send(oracle.request_message(1, 0, b"", oracle.request(request)))
    handle = child.rank.submit("allreduce", "x", [array], reduce_op=SUM)
    assert child.exchange(b"\0\0\0\0") == ONE
    wait_for(lambda: child.count_answers() == 1)
    child.rank.finish(handle)
    assert count_late(child, "allreduce", [array], oracle.data_message(oracle.DATA, 4, ONE)) == 0
    assert array[0] == 201
