"""How a group ends: a rank whose program ends with an error, one that shuts down while others work, one that aborts.

All others read the words of the end, while they wait and afterwards; what all have agreed on is finished.
"""

import contextlib
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np
import pytest
from fabric import Relay
from native_build import FLAVOUR
from ranks import SUM, Group, Rank, Written, on_ranks, run_script, wait_for

from horo.core.context import Context
from horo.errors import AbortedError, HoroError, PeerLostError

TIMES = 8 if FLAVOUR else 25
WORDS = "ValueError: bad sample in shard 7"
ENDS = [(hosts, ender) for hosts in ([2], [2, 2], [1, 1, 1]) for ender in range(sum(hosts))]


def fails(rank: Rank, name: str, kind: type[HoroError] = PeerLostError) -> str:
    """What a collective of the rank fails with."""
    with pytest.raises(kind) as error:
        rank.allreduce(np.ones(3), name)
    assert error.type is kind
    return str(error.value)


WAYS = [(Context.end, PeerLostError, "ended with"), (Context.abort, AbortedError, "has aborted the group:")]


@pytest.mark.parametrize(("hosts", "ender"), ENDS, ids=str)
@pytest.mark.parametrize(("way", "kind", "said"), WAYS)
@on_ranks("hosts", log_level=5)
def test_all_others_read_the_words_while_they_wait_and_afterwards(
    rank: Rank, ender: int, *, way: Callable[[Context, str], None], kind: type[HoroError], said: str
) -> None:
    rank.allreduce(np.ones(3), "first")
    rank.meet()
    if rank.rank == ender:
        way(rank.context, WORDS)
        assert fails(rank, "own", kind).startswith(f"this rank {said} {WORDS}")
        return
    expected = rf"rank {ender} \(host\d\) {said} {WORDS}"
    assert re.match(expected, fails(rank, "second", kind))
    assert re.match(expected, fails(rank, "third", kind))
    assert re.fullmatch(expected, str(rank.context.health()))


@on_ranks([4], [2, 2], [1, 1, 1], times=TIMES, log_level=5)
def test_what_one_rank_has_finished_is_finished_by_all_when_it_ends(rank: Rank) -> None:
    """All have agreed on it, and it stands in the log in front of the end: nobody gets an error for it."""
    for step in range(3):
        total = rank.size * (rank.size + 1) / 2
        assert (rank.allreduce(np.full(5000, rank.rank + 1.0), f"x{step}") == total).all()
    rank.barrier("last")
    rank.context.end("SystemExit: 75")
    health = str(rank.context.health())
    assert re.fullmatch(r"(this rank|rank \d \(host\d\)) ended with SystemExit: 75", health)


@on_ranks([2])
def test_the_names_of_what_is_pending_are_cut_and_never_the_words_before_them(rank: Rank, written: Written) -> None:
    """The flight recorder is not shown for an end that is explained."""
    words = "x" * 800 + "; use the remedy"
    if rank.rank == 1:
        wait_for(lambda: rank.group.contexts[0].counters()["requests"] > 0)
        rank.context.end(words)
        return
    with pytest.raises(PeerLostError) as error:
        rank.barrier("y" * 500)
    assert f"{words}; pending here: 'yyy" in str(error.value)
    assert rank.context.events()[-1].event == "lost"
    assert "last events" not in written()


@on_ranks([1, 1])
def test_long_words_are_cut_and_bytes_that_are_none_are_replaced(rank: Rank) -> None:
    if rank.rank == 0:
        rank.context.end("x\0" + "\u00e4" * 600)
    wait_for(lambda: rank.context.health() is not None)
    who = ["this rank", "rank 0 (host0)"][rank.rank]
    assert str(rank.context.health()) == f"{who} ended with x " + "\u00e4" * 446 + "\ufffd"


def test_the_first_death_or_end_stays_the_cause(native: ModuleType) -> None:
    """Also where the dead themselves lose the others, and write that into memory that all have."""
    with Group([3]) as group:
        group.run(lambda rank: rank.barrier())
        for victim in (1, 2):
            group.kill(victim)
            group.leave(victim)
            assert str(group.contexts[0].health()).startswith("rank 1 (host0) is gone")
    assert native.lib.shim_arena_cause_of_two() == 1  # here seldom two ranks write an end


@pytest.mark.parametrize(("hosts", "ender"), [([1, 1], 1), ([1, 1], 0), ([2, 2], 2), ([2], 1)], ids=str)
@on_ranks("hosts", times=TIMES, log_level=5)
def test_the_words_arrive_also_where_the_rank_leaves_right_after(rank: Rank, ender: int) -> None:
    if rank.rank == ender:
        rank.context.end(WORDS)
        rank.group.leave(ender)
        return
    wait_for(lambda: rank.context.health() is not None)
    assert WORDS in str(rank.context.health())


MIB = 1 << 20
SLOWLY = Relay(data_chunk_bytes=1 << 15, chunk_pause_s=0.025)
"""1.3 MB/s: 4 MiB take more than the grace of 2 s."""

# Five hosts of one rank; a broadcast goes down the chain 0-1-2-3-4. Rank 1 is stopped before the data comes. Rank 0
# has sent its part and shuts down; then rank 1 is killed. Rank 4's only peer in the tree of hosts is rank 0.
SCRIPT = """
go, left, heard, over = os.pipe(), os.pipe(), os.pipe(), os.pipe()
rank, pids = forked([1] * 5, None, log_level=5, tcp=True)
if rank is None:
    os.waitpid(pids[1], os.WUNTRACED)
    os.write(go[1], b"x")
    os.read(left[0], 1)
    time.sleep(0.5)  # by now rank 0 has executed its LEAVE record, and waits for those behind it
    os.kill(pids[1], signal.SIGKILL)
    for _ in range(3):
        os.read(heard[0], 1)
    os.write(over[1], b"x" * 3)
    for pid in pids.values():
        os.waitpid(pid, 0)
    sys.exit(0)
me = rank.rank
rank.barrier()
array = np.full(75_000, me, np.float32)
if me == 0:
    os.read(go[0], 1)
    rank.broadcast(array, 0)
    os.write(left[1], b"x")
    rank.context.destroy()
    os._exit(0)
sent = rank.context.counters()["messages_sent"]
handle = rank.submit("broadcast", "b", [array], root_rank=0)
if me == 1:
    while rank.context.counters()["messages_sent"] == sent:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    rank.finish(handle)
    os.write(1, f"{me} finished\\n".encode())
except Exception as error:
    os.write(1, f"{me} {type(error).__name__} {error}\\n".encode())  # one write: lines of ranks do not mix
os.write(heard[1], b"x")
os.read(over[0], 1)  # as one that writes a checkpoint: its sockets stay
"""


def test_a_death_after_the_leader_in_between_has_left_is_heard_by_all_and_named() -> None:
    said = run_script(SCRIPT)
    outcomes = dict(line.split(" ", 1) for line in said.splitlines())
    for rank in ("2", "3", "4"):
        assert outcomes[rank].startswith("PeerLostError rank 1 "), said


@on_ranks([1, 1], relay=SLOWLY, segment_bytes=4 * MIB, stall_warning_ms=0)
def test_a_batch_that_moves_slowly_is_finished_by_ranks_that_leave(rank: Rank) -> None:
    """One segment, pieces of which arrive all the time: that is no standing still, though it lasts."""
    array = np.ones(MIB, np.float32)
    handle = rank.submit("allreduce", "slow", [array], reduce_op=SUM)
    if rank.rank == 0:
        rank.finish(handle)
    else:
        wait_for(lambda: rank.context.counters()["link_bytes"] > 0)
        rank.group.leave(1)
    assert array.min() == 2


def test_links_are_silent_again_after_an_operation_that_took_long() -> None:
    def is_probed(rank: int) -> bool:
        links = [link for link in group._ends[rank] if link.family != socket.AF_UNIX]
        return any(link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for link in links)

    def body(rank: Rank) -> None:
        if rank.rank == 0:
            wait_for(lambda: all(is_probed(other) for other in (1, 2, 3)))
        rank.barrier()

    with Group([2, 2], tcp=True) as group:
        group.run(body)
        wait_for(lambda: not any(is_probed(rank) for rank in range(4)))


@pytest.mark.parametrize(("hosts", "leaver", "dead", "asker"), [([3], 1, 0, 2), ([2, 2], 1, 2, 3)], ids=str)
@pytest.mark.parametrize("asks_before", [False, True])
def test_a_later_death_is_not_the_cause(
    hosts: list[int], leaver: int, dead: int, asker: int, asks_before: bool
) -> None:
    """Also to a rank that had nothing pending, and so has not looked at the log since."""

    def ask(rank: Rank) -> None:
        with pytest.raises(AbortedError, match=rf"rank {leaver} \(host0\) has shut horo down"):
            rank.barrier("later")

    with Group(hosts, log_level=5) as group:
        group.run(lambda rank: rank.barrier())
        group.leave(leaver)
        wait_for(lambda: group.contexts[asker].health() is not None)
        if asks_before:
            group.run(ask, ranks=[asker])
        group.kill(dead)
        group.run(ask, ranks=[asker])


ROUNDS = 20 if FLAVOUR else 100
TOLD_WITHIN_S = 15
GRACE_S = 2
"""LEAVE_GRACE_MS of the core."""
LEAVERS = [(hosts, leaver) for hosts in ([2], [1, 1], [2, 2]) for leaver in range(sum(hosts))]


def total(size: int) -> float:
    return size * (size + 1) / 2


def told(leaver: int) -> str:
    return rf"rank {leaver} \(host\d\) has shut horo down"


@on_ranks([2], [1, 1], [2, 2], [1, 1, 1, 1], times=ROUNDS, within_s=TOLD_WITHIN_S, log_level=5)
def test_all_may_leave_at_once_and_what_was_agreed_on_is_finished_everywhere(rank: Rank) -> None:
    """The log ends at one place for all: a tensor is reduced on all ranks, or on none."""
    arrays = [np.ones(20_000, np.float32) for _ in range(4)]
    rank.meet()
    with contextlib.suppress(AbortedError):  # another rank has left already
        for i, array in enumerate(arrays):
            rank.submit("allreduce", f"x{i}", [array], reduce_op=SUM)
    rank.group.leave(rank.rank)
    assert all(array.min() == array.max() in (1, rank.size) for array in arrays)
    assert rank.is_common("reduced", [float(array.max()) for array in arrays])


@pytest.mark.parametrize("submits", [False, True])
@on_ranks([3], [1, 1, 1], [2, 1], [1, 2], within_s=TOLD_WITHIN_S)
def test_waiting_ranks_are_told_of_a_leaver_while_rank_0_computes(rank: Rank, submits: bool) -> None:
    """Rank 0 does not call horo until the others know."""
    rank.barrier("start")
    if rank.rank == 0:
        rank.await_mark("all know", timeout_s=20)
        with pytest.raises(AbortedError, match=told(2)):
            rank.barrier("later")
    elif rank.rank == 1:
        with pytest.raises(AbortedError, match=told(2)):
            rank.barrier("never")
        rank.mark("all know")
    else:
        if submits:
            rank.submit("barrier", "never", [])
        rank.group.leave(2)


@pytest.mark.parametrize("hosts", [[2], [3], [2, 2]], ids=str)
def test_a_leaver_does_not_wait_for_an_idle_rank_0(hosts: list[int]) -> None:
    """Its leader's program computes, and its thread is parked: the call wakes it, long before the grace is over."""
    took_s = []
    for _ in range(3):
        with Group(hosts) as group:
            group.run(lambda rank: rank.barrier())
            begin_s = time.monotonic()
            group.leave(1)
            took_s.append(time.monotonic() - begin_s)
    assert min(took_s) < GRACE_S


@pytest.mark.parametrize(("hosts", "leaver"), [*LEAVERS, ([1, 2], 2), ([1, 1, 1, 1], 2)], ids=str)
@on_ranks("hosts", within_s=TOLD_WITHIN_S, segment_bytes=1 << 12)
def test_a_batch_that_runs_is_finished_by_a_rank_that_leaves(rank: Rank, leaver: int) -> None:
    """All have agreed on it, so all get its result; what comes later is aborted."""
    own = np.full(1_000_000, rank.rank + 1, np.float32)  # a thousand segments, of which one is awaited
    never = rank.submit("barrier", "never", []) if rank.rank != leaver else 0
    large = rank.submit("allreduce", "large", [own], reduce_op=SUM)
    if rank.rank == leaver:
        wait_for(lambda: own[0] == total(rank.size))
        rank.group.leave(leaver)
    else:
        rank.finish(large)
        with pytest.raises(AbortedError, match=told(leaver)):
            rank.finish(never)
    assert (own == total(rank.size)).all()


@pytest.mark.parametrize("leaver", [1, 2, 3])
@pytest.mark.parametrize("submits", [False, True])
@on_ranks([1, 1, 1, 1], times=ROUNDS // 2, within_s=TOLD_WITHIN_S, log_level=5)
def test_all_of_a_tree_of_hosts_are_told_of_a_leaver_in_its_middle(rank: Rank, leaver: int, submits: bool) -> None:
    """Host 3 hangs below host 2, so the message of its parent's end must not look like a loss."""
    array = np.full(1000, rank.rank + 1, np.float64)
    assert (rank.allreduce(array, "start") == total(4)).all()
    rank.meet()
    if rank.rank == leaver:
        if submits:
            rank.submit("barrier", "next", [])
        rank.group.leave(leaver)
        return
    with pytest.raises(AbortedError, match=told(leaver)):
        for i in range(10_000):
            rank.barrier("next" if i == 0 else f"later{i}")


def abort_beside_waits(hosts: list[int]) -> float:
    """Rank 1 calls nothing, and reads nothing of the end before rank 0 is through with it; the seconds it takes."""
    with Group(hosts, log_level=5) as group, ThreadPoolExecutor() as pool:
        rank = Rank(group.contexts[0], group.links)
        context = rank.context
        handles = [rank.submit("allreduce", f"x{i}", [np.ones(5)], reduce_op=1) for i in range(3)]
        waits = [pool.submit(context.wait, handle) for handle in handles]
        of_any = pool.submit(context.wait_any, handles)
        wait_for(lambda: len(context.callers()) == 5)
        began = time.monotonic()
        context.abort(WORDS)
        took = time.monotonic() - began
        of_any.result(20)
        said = f"this rank has aborted the group: {WORDS}; pending here: 'x0', "
        for wait in waits:
            with pytest.raises(AbortedError, match=f"^{said}"):
                wait.result(20)
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

    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(call_on, number) for number in range(3)]
        if rank.rank == 0:
            wait_for(lambda: rank.context.counters()["tensors"] > 5)
            rank.context.abort(WORDS)
        for call in calls:
            call.result(30)
