"""Threads and cores: who drives while callers come or stop coming, waits beside programs that compute, ranks that share
a core, and stores past the cache that cores share.
"""

import ctypes
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import wire_oracle as oracle
from fabric import close_setup, make_setups
from hypothesis import given
from hypothesis import strategies as st
from ranks import SUM, Group, Rank, context_of, describe, on_ranks, wait_for

from horo.core import context
from horo.core.context import Context

MS = 1_000_000
SHORT, SLICE, LONG = 10_000, 3 * MS, 12 * MS  # one that takes long is enough by itself


def sleeping_until(
    native: ModuleType, yields: list[tuple[int, int]], begin_until: int = 0, begin_while: int = 0
) -> list[int]:
    """Until when waits sleep, after each yield: of how many ns, at which time."""
    until = native.ffi.new("int64_t[]", len(yields))
    took, now = ([each[i] for each in yields] for i in (0, 1))
    native.lib.shim_contention_note(begin_until, begin_while, took, now, len(yields), until)
    return list(until)


@pytest.mark.parametrize(
    ("yields", "expected"),
    [
        pytest.param([(SHORT, i * MS) for i in range(1, 100)], [0] * 99, id="to ranks that wait"),
        pytest.param([(SLICE, i * 30 * MS) for i in range(1, 100)], [0] * 99, id="a slice now and then"),
        pytest.param(
            [(SLICE, 1000 * MS), (SHORT, 1001 * MS), *((SLICE, at * MS) for at in (1010, 1020, 1030))],
            [0, 0, 0, 0, 1130 * MS],
            id="slices that follow one another",
        ),
        pytest.param(
            [(LONG, MS), *((LONG, at * MS) for at in (101, 301, 701, 1501, 2501))],
            [at * MS for at in (101, 301, 701, 1501, 2501, 3501)],
            id="each time longer",
        ),
        pytest.param([(LONG, MS), (SHORT, 200 * MS), (LONG, 201 * MS)], [101 * MS, 101 * MS, 401 * MS], id="still"),
        pytest.param([(LONG, MS), (SHORT, 201 * MS), (LONG, 202 * MS)], [101 * MS, 101 * MS, 302 * MS], id="forgotten"),
    ],
)
def test_waits_sleep_on_taken_cores(native: ModuleType, yields: list[tuple[int, int]], expected: list[int]) -> None:
    assert sleeping_until(native, yields) == expected


INT64 = st.integers(-(2**63), 2**63 - 1)


@given(INT64, INT64, st.integers(0, 2**62))
def test_whatever_stands_in_the_hosts_memory_lets_waits_sleep_for_a_second_at_most(
    native: ModuleType, begin_until: int, begin_while: int, now: int
) -> None:
    is_on = native.lib.shim_contention_is_on
    assert is_on(begin_until, now) == (0 < begin_until - now <= 1000 * MS)
    for took in (SHORT, LONG):
        (until,) = sleeping_until(native, [(took, now)], begin_until, begin_while)
        assert until == begin_until or 100 * MS <= until - now <= 1000 * MS
    assert is_on(until, now)


@pytest.mark.parametrize("sleeps_under_contention", [True, False])
@on_ranks("sleeps_under_contention", spin_us=20_000_000)
def test_a_wait_sleeps_where_others_want_the_cores(
    rank: Rank, native: ModuleType, sleeps_under_contention: bool
) -> None:
    """Else it would spin for twenty seconds."""
    waiting = rank.group.contexts[0]
    rank.run("barrier", "first", [])
    before = waiting.counters()["sleeps"]
    native.lib.shim_contention_yielded(context_of(native, rank), LONG)
    rank.meet()
    if rank.rank == 1:
        until = time.monotonic() + 0.2

        def is_over() -> bool:
            native.lib.shim_contention_yielded(context_of(native, rank), LONG)  # it lasts
            slept = waiting.counters()["sleeps"] > before
            return slept if sleeps_under_contention else time.monotonic() > until

        wait_for(is_over)
    rank.run("barrier", "second", [])
    assert rank.rank == 1 or (waiting.counters()["sleeps"] > before) == sleeps_under_contention


CORES = sorted(os.sched_getaffinity(0))
ASLEEP = -1


def choose(native: ModuleType, core_of: list[int], me: int, allowed: list[int]) -> int:
    return int(native.lib.shim_core_choose(core_of, len(core_of), me, allowed, len(allowed)))


@pytest.mark.parametrize(
    ("core_of", "me", "allowed", "expected"),
    [
        ([0, 0], 1, [0, 1], 1),
        ([0, 0], 0, [0, 1], -1),  # the last one moves
        ([0, 1], 1, [0, 1], -1),  # nobody is crowded
        ([0, 0], 1, [0], -1),  # nowhere to go
        ([5, 5], 1, [1, 5], 1),  # behind the last comes the first
        ([5, 5], 1, [1, 5, 7], 7),
        ([0, 0, 0, 1], 2, [0, 1], 1),  # three and one become two and two
        ([0, 0, 1], 1, [0, 1], -1),  # two and one would become one and two
        ([0, 0, 0, 1], 1, [0, 1], -1),  # not the last of its core
        ([0, 0, 1, ASLEEP], 1, [0, 1, 2], 2),
        ([0, ASLEEP, ASLEEP], 0, [0, 1], -1),  # who sleeps needs no core
        ([3, 3], 1, [0, 1], 0),  # it may be on a core that it is no longer allowed
        ([1023, 1023], 1, [0, 1023], 0),
    ],
)
def test_the_last_rank_on_a_crowded_core_goes_where_fewer_are(
    native: ModuleType, core_of: list[int], me: int, allowed: list[int], expected: int
) -> None:
    assert choose(native, core_of, me, allowed) == expected


@pytest.mark.parametrize(
    ("core_of", "asleep", "expected"),
    [
        ([3, 3], [0, 0], 1),
        ([3, 4, 3], [0, 0, 0], 1),
        ([3, 3], [0, 1], 0),
        ([3, 3], [1, 0], 1),
        ([3, 4], [0, 0], 0),
        ([3], [0], 0),
        ([0, 0], [0, 0], 0),  # ranks do not tell
    ],
)
def test_a_core_is_shared_where_another_rank_is_at_work_on_it(
    native: ModuleType, core_of: list[int], asleep: list[int], expected: int
) -> None:
    assert native.lib.shim_core_is_shared(core_of, asleep, len(core_of)) == expected


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@on_ranks([2], spin_us=1000, leaves_crowded_cores=True)
def test_a_rank_leaves_the_core_of_another_and_keeps_its_affinity(rank: Rank) -> None:
    """Two ranks begin on one core, rank 1 may use two, and both call until it has moved."""
    libc, ends_s = ctypes.CDLL(None), time.monotonic() + 60
    mine = {CORES[0]} if rank.rank == 0 else set(CORES[:2])
    os.sched_setaffinity(0, {CORES[0]})
    os.sched_setaffinity(0, mine)
    goes_on = np.ones(1, np.float32)
    while goes_on[0] > 0:  # both hear of the end in the same operation
        has_moved = rank.rank == 1 and libc.sched_getcpu() == CORES[1]
        goes_on[0] = not has_moved
        assert time.monotonic() < ends_s, rank.context.counters()["moves"]
        rank.run("allreduce", "x", [goes_on], reduce_op=3)
    assert os.sched_getaffinity(0) == mine
    assert rank.rank == 1 or rank.context.counters()["moves"] == 0


BYTES = 1 << 20
ORDINARY, STREAM = 0, 1
NEAR = (75_000, 100_000)
"""Nanoseconds for 1 MiB with each store where cores share a cache, as measured: past the cache is dearer by a third."""
FAR = (620_000, 70_000)
"""Where they share none."""


class Choices:
    """The operations of a rank, with costs that a test makes up."""

    def __init__(self, native: Any) -> None:
        self._lib = native.lib
        self._self = native.ffi.gc(self._lib.shim_stores_create(), self._lib.shim_stores_destroy)

    def run(self, count: int, cost: Callable[[int, int], float]) -> list[int]:
        """The stores of so many operations; ``cost``: of one, by its number and its store."""
        stores = []
        for number in range(count):
            stores.append(self._lib.shim_stores_try(self._self, BYTES))
            self._lib.shim_stores_learn(self._self, int(cost(number, stores[-1])))
        return stores


@pytest.mark.parametrize(("costs", "better"), [(NEAR, ORDINARY), (FAR, STREAM)])
def test_the_cheaper_store_is_used_from_the_first_operations(native: Any, costs: tuple[int, int], better: int) -> None:
    """But for two that pay for page faults, four with each store, and one in 251 with the other."""
    stores = Choices(native).run(2000, lambda number, store: costs[store] * (20 if number < 2 else 1))
    assert stores[:10] == [ORDINARY, ORDINARY, *[STREAM, STREAM, ORDINARY, ORDINARY] * 2]
    assert stores[10:].count(1 - better) == len(range(251, 2000, 251))


@pytest.mark.parametrize(("before", "after", "better"), [(NEAR, FAR, STREAM), (FAR, NEAR, ORDINARY)])
def test_changes_are_followed(native: Any, before: tuple[int, int], after: tuple[int, int], better: int) -> None:
    """At once where the store in use becomes dear; where the other one becomes cheaper, when it is tried."""
    choices = Choices(native)
    choices.run(300, lambda _, store: before[store])
    stores = choices.run(1000, lambda _, store: after[store])
    used = stores.index(better)
    assert used < (20 if better == STREAM else 251)
    assert stores[used:].count(1 - better) <= 4


def test_a_reducescatter_does_not_take_the_wait_for_a_late_rank_for_the_cost_of_stores(native: Any) -> None:
    """Rank 1 is late until rank 0, which has filled its slot, has spun so long that it sleeps."""
    rows, size, spin_s = 1 << 16, 2, 0.3
    both = threading.Barrier(size)
    slept_before = [0]

    def body(rank: Rank) -> float:
        values, result = np.ones(size * rows, np.float32), np.zeros(rows, np.float32)
        tensors = describe([values], [result])
        buffer = context.RequestBuffer.of(context.OPS["reducescatter"], "x", tensors, reduce_op=SUM, sync=True)
        for number in range(6):
            if rank.rank == 0:
                slept_before[0] = rank.context.counters()["sleeps"]
            both.wait(60)
            if rank.rank == 1 and number >= 4:  # these two are with ordinary stores; the quicker one counts
                wait_for(lambda: group.contexts[0].counters()["sleeps"] > slept_before[0])
            rank.context.run(buffer)
            assert (result == size).all()
        return native.lib.shim_stores_scatter_cost(context_of(native, rank)) * 1e-12 * values.nbytes

    options = {"segment_bytes": 1 << 20, "direct_bytes": 0, "sleeps_under_contention": False}
    with Group((size,), spin_us=int(spin_s * 1e6), **options) as group:
        cost_s, _ = group.run(body)
    assert 0 < cost_s < spin_s / 2


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
