"""Ranks that join: what the others do without them, what nobody can do for them, and who joined last."""

import itertools
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import native_build
import numpy as np
import pytest
from ranks import NUMPY_OF_DTYPE, SUM, Group, Rank, on_ranks, recorded_stderr, run_ranks, wait_for

from horo.errors import AbortedError, DeadlockError, HoroError, PeerLostError, StalledError, UsageError


def join(rank: Rank, team: int = 0) -> int:
    """Joins and waits; the rank that joined last."""
    return finish_join(rank, rank.context.start_join(team))


def finish_join(rank: Rank, handle: int) -> int:
    rank.context.wait(handle)
    last = rank.context.joined_last(handle)
    rank.context.release(handle)
    return last


def joins_first(rank: Rank, joined: int) -> int | None:
    """The first ``joined`` ranks join; the others go on when all of these count as joined, which they find out by an
    operation of their own; its handle, or None for the others."""
    if rank.rank < joined:
        return rank.context.start_join(0)
    rank.barrier("they have joined")
    return None


def end_join(rank: Rank, handle: int | None) -> int:
    return join(rank) if handle is None else finish_join(rank, handle)


@pytest.mark.parametrize("dtype", sorted(NUMPY_OF_DTYPE))
@on_ranks([2], [3], [1, 1], [2, 2], [2, 1, 3])
def test_values_of_joined_ranks_change_no_reduction(rank: Rank, dtype: str) -> None:
    reducers = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
    kind = NUMPY_OF_DTYPE[dtype]
    rng = np.random.default_rng(3)
    if np.dtype(kind).kind != "f":
        reducers |= {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
    low = 0 if dtype.startswith("u") or dtype == "bool" else -3
    inputs = [rng.integers(low, 4, 3000).astype(kind) for _ in range(rank.size)]
    handle = joins_first(rank, 1)
    for _ in range(2 if handle is None else 0):  # by name, by id
        for op, reducer in reducers.items():
            for count in (3, 3000):
                expected = reducer.reduce([each[:count] for each in inputs[1:]], dtype=kind)
                result = rank.allreduce(inputs[rank.rank][:count].copy(), f"{op}{count}", op)
                assert np.array_equal(expected, result), (op, count)
    end_join(rank, handle)


@on_ranks([2])
def test_a_complex_number_of_a_joined_rank_multiplies_by_the_formula(rank: Rank) -> None:
    """(inf + 0i)(1 + 0i) is (inf * 1 - 0 * 0) + (inf * 0 + 0 * 1)i: no factor keeps the zero beside infinity."""
    if rank.rank == 0:
        got = rank.allreduce(np.full(3, complex(np.inf, 0)), "x", "product")
        assert np.all(got.real == np.inf) and np.all(np.isnan(got.imag))
    join(rank)


@pytest.mark.parametrize("is_behind", [False, True], ids=["alone", "behind a refusal"])
@on_ranks([2])
def test_a_rank_that_has_joined_can_submit_nothing(rank: Rank, is_behind: bool) -> None:
    """Before that, it can submit all but under the name of joining."""
    with pytest.raises(UsageError, match="is the name of joining"):
        rank.submit("allreduce", "join.noname", [np.ones(1)], reduce_op=SUM)
    with pytest.raises(UsageError, match="does not exist"):
        rank.context.start_join(3)
    if rank.rank == 1:
        rank.await_mark("has submitted")
        if is_behind:
            with pytest.raises(UsageError, match="has refused it: not now"):
                rank.context.add_team([0, 1])
        rank.context.add_team([0, 1])
    else:  # all ranks must take part in that, so it cannot join meanwhile
        if is_behind:
            rank.context.refuse(0, "add_process_set or remove_process_set", UsageError("not now"))
        before = rank.context.counters()["requests"]
        with ThreadPoolExecutor() as pool:
            adding = pool.submit(rank.context.add_team, [0, 1])
            wait_for(lambda: rank.context.counters()["requests"] > before)
            with pytest.raises(UsageError, match="a change of process sets is pending"):
                rank.context.start_join(0)
            rank.mark("has submitted")
            adding.result(60)
    handle = joins_first(rank, 1)
    if handle is not None:
        with pytest.raises(UsageError, match="'x': rank 0 has joined"):
            rank.submit("allreduce", "x", [np.ones(1)], reduce_op=SUM)
        with pytest.raises(UsageError, match="rank 0 has joined"):
            rank.context.start_join(0)
        with pytest.raises(UsageError, match="rank 0 has joined"):
            rank.context.add_team([0])
        assert rank.context.joined_last(handle) < 0
        rank.mark("is refused")
    rank.await_mark("is refused")  # rank 0 joins until the last rank does
    end_join(rank, handle)
    assert rank.allreduce(np.ones(2))[0] == 2.0
    assert rank.context.joined_last(rank.submit("barrier", "no join", [])) < 0


@pytest.mark.parametrize(("end", "error"), [(Group.kill, PeerLostError), (Group.leave, AbortedError)])
@on_ranks([2], [3], [1, 1], [2, 2], [1, 1, 1])
def test_a_rank_that_is_gone_ends_the_wait_of_those_that_have_joined(
    rank: Rank, end: Callable[[Group, int], None], error: type[HoroError]
) -> None:
    """The last rank ends after an operation that needs all others to have joined."""
    last = rank.size - 1
    if rank.rank == last:
        rank.allreduce(np.ones(40_000), "x")
        end(rank.group, last)
        return
    handle = rank.context.start_join(0)
    with pytest.raises(error, match=f"rank {last}"):
        rank.context.wait(handle)
    assert rank.context.joined_last(handle) < 0
    rank.context.release(handle)


@on_ranks([2], [3], [1, 1], [2, 2])
def test_ranks_may_end_in_the_middle_of_what_joined_ones_do_for_them(rank: Rank) -> None:
    """The memory of stand-ins is freed with the engine."""
    dead = rank.size - 1
    count = 100_000 if native_build.FLAVOUR else 1_000_000  # a sum takes as long
    if rank.rank == 0:
        handle = rank.context.start_join(0)
        with pytest.raises(PeerLostError):
            rank.context.wait(handle)
        rank.context.release(handle)
        return
    rank.barrier("joined")
    with pytest.raises(PeerLostError):
        for step in range(10_000):
            if rank.rank == dead and step == 20:
                handle = rank.submit("allreduce", "x", [np.ones(count)], reduce_op=SUM)
                rank.group.kill(dead)
                rank.finish(handle)  # its engine lives on and uses the tensor until then
            rank.allreduce(np.ones(count), "y" if rank.rank == dead and step >= 20 else "x")


@on_ranks([3], [1, 2], [1, 1, 1])
def test_ranks_that_wait_for_one_another_while_one_has_joined_are_a_deadlock(rank: Rank) -> None:
    rank.context.blocked_after_s = 0.05
    if rank.rank == 0:
        handle = rank.context.start_join(0)
    else:
        rank.barrier("joined")
        rank.allreduce(np.ones(3), "step")
        handle = rank.submit("allreduce", "x" if rank.rank == 1 else "y", [np.ones(1)], reduce_op=SUM)
    with pytest.raises(DeadlockError) as caught:
        rank.context.wait(handle)
    for part in ("rank 0 waits for 'join.noname'", "'x'", "'y'"):
        assert part in str(caught.value)


@pytest.mark.parametrize("hosts", [[3], [1, 2]], ids=str)
def test_a_report_of_a_stall_tells_who_has_joined(hosts: list[int]) -> None:
    def body(rank: Rank) -> None:
        handle = joins_first(rank, 1)
        if rank.rank == 2:
            wait_for(lambda: re.search(r"rank 2 \(host\d\) has not submitted .*'late'", written()) is not None)
        if rank.rank > 0:
            rank.allreduce(np.ones(3), "late")
        end_join(rank, handle)

    with recorded_stderr() as written:
        run_ranks(body, hosts, stall_warning_ms=300)
        text = written()
    reports = [each.partition("\nhoro [")[0] for each in text.split("waiting for")[1:]]
    named = [each for each in reports if "'late'" in each]  # before it is submitted, rank 0 counts as joined
    named = [each for each in named if "rank 0" in each and "no answer from rank 0" not in each]
    assert all("rank 0 (host0) has joined" in report for report in named), text
    assert named or hosts != [3], text


WARNING_MS, SHUTDOWN_MS = 400, 3000
"""The second is far longer than a busy machine holds up a rank between two steps."""


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def work(rank: Rank, how: str, team: int) -> None:
    """What ranks that have not joined do for longer than ``SHUTDOWN_MS``."""
    end = time.monotonic() + SHUTDOWN_MS / 1000 + 1
    if how == "nothing":
        pause(end - time.monotonic())
        return
    while rank.allreduce(np.array([time.monotonic() > end], np.int32), team=team)[0] == 0:  # the same step for all
        pause(0.02)


@pytest.mark.parametrize(("hosts", "how"), [([3], "nothing"), ([2, 1], "in the world"), ([1, 2], "in a team")], ids=str)
@on_ranks("hosts", stall_warning_ms=WARNING_MS, stall_shutdown_ms=SHUTDOWN_MS)
def test_a_join_waits_as_long_as_the_others_need(rank: Rank, how: str) -> None:
    """A team in which nothing happens is joined, too; or only a team works, which the joined rank does not see."""
    members = [1, 2] if how == "in a team" else [0, 1]
    team = rank.context.add_team(members)
    if rank.rank != 0:
        work(rank, how, team if how == "in a team" else 0)
    handles = [rank.context.start_join(joined) for joined in [0, team] if joined == 0 or rank.rank in members]
    rank.finish(*handles)


@on_ranks([3], stall_warning_ms=100, stall_shutdown_ms=300)
def test_what_waits_beside_a_join_ends_the_job_as_ever(rank: Rank) -> None:
    """Rank 0 has joined, rank 1 waits for rank 2, which does nothing."""
    if rank.rank == 2:
        rank.await_mark("has ended")
        return
    with pytest.raises(StalledError, match=r"rank 2"):
        if rank.rank == 0:
            handle = rank.context.start_join(0)
            rank.mark("has joined")
            rank.context.wait(handle)
        else:
            rank.await_mark("has joined")
            rank.allreduce(np.ones(3), "x")
    rank.mark("has ended")


MORE_THAN_TRAVELS_WITH_ITS_ANNOUNCEMENT = 5000

FOUR = [[0, 1, 2, 3], [1, 2, 3, 0], [3, 2, 1, 0], [0, 1, 3, 2], [0, 3, 1, 2], [2, 3, 0, 1], [3, 0, 2, 1], [1, 0, 2, 3]]
ORDERS = [
    ([3], [0, 1, 2], [list(order) for order in itertools.permutations(range(3))]),
    ([2, 2], [0, 1, 2, 3], FOUR),
    ([1, 1, 2], [0, 1, 2, 3], FOUR),
    ([4], [1, 2, 3], [list(order) for order in itertools.permutations([1, 2, 3])]),
    ([2, 3], [1, 2, 3, 4], [[rank + 1 for rank in order] for order in FOUR]),
]


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize(("hosts", "members", "orders"), ORDERS, ids=str)
@on_ranks("hosts")
def test_it_is_the_last(
    rank: Rank, hosts: list[int], members: list[int], orders: list[list[int]], pending: bool
) -> None:
    """A rank joins once the one before has called, and the root has heard of that if it is on another host."""
    root = rank.group.contexts[members[0]]
    team = rank.add_team(members) if len(members) < rank.size else 0
    for turn, order in enumerate(orders):
        rank.barrier(f"turn {turn}")
        if rank.rank not in order:
            continue
        place = order.index(rank.rank)
        if place > 0:
            rank.await_mark((turn, place - 1))
        array = np.ones(MORE_THAN_TRAVELS_WITH_ITS_ANNOUNCEMENT)
        handles = [rank.submit("allreduce", "x", [array], reduce_op=SUM, team=team)] if pending else []
        before = root.counters()["messages_sent"]
        joined = rank.context.start_join(team)
        if len(hosts) > 1:  # the root tells the others of each rank that joins, by a message
            wait_for(lambda before=before: root.counters()["messages_sent"] > before)  # type: ignore[misc]
        rank.mark((turn, place))
        rank.finish(*handles)
        assert not pending or np.all(array == len(members))
        assert finish_join(rank, joined) == order[-1]
