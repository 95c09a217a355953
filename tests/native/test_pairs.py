"""Sends and receives between two ranks."""

from __future__ import annotations

import errno
import os
import random
import re
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from doubles import build_double
from ranks import Group, Rank, on_ranks, run_ranks, run_script, wait_for

from horo.errors import AbortedError, MismatchError, PeerLostError, UsageError

ways = pytest.mark.parametrize(
    ("direct_bytes", "hosts"),
    [(0, [3]), (1, [3]), (1, [1, 1, 1]), (1, [2, 2])],
    ids=["by the ring", "direct", "three hosts", "two hosts"],
)
"""By which the data comes; all to the other hosts are the same."""
SIZES = [0, 1, 4096, 4097, 1 << 15, 100_003, 1 << 20, 3_000_000]


def content(key: object, count: int) -> np.ndarray:
    return np.frombuffer(random.Random(repr(key)).randbytes(min(count, 5000)), np.uint8).repeat(1 + count // 5000)[
        :count
    ]


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("spin_us", [0, 1000])
@on_ranks([3], [2, 2], "spin_us")
def test_a_token_goes_round(rank: Rank, sync: bool) -> None:
    token = np.zeros(2, np.int64)
    for lap in range(100):
        if rank.rank > 0 or lap > 0:
            rank.finish(rank.receive(token, (rank.rank - 1) % rank.size, sync=sync))
            assert np.all(token == lap * rank.size + rank.rank - 1)
        token[:] = lap * rank.size + rank.rank
        rank.finish(rank.send(token, (rank.rank + 1) % rank.size, sync=sync))
        if lap == 99 and rank.rank == 0:
            rank.finish(rank.receive(token, rank.size - 1))


@pytest.mark.parametrize("hosts", [[4], [1, 2, 1], [2, 2]], ids=str)
@on_ranks("hosts")
def test_a_receive_from_any_rank_tells_whose_it_was_and_starves_nobody(rank: Rank, hosts: list[int]) -> None:
    rounds = 50
    if rank.rank > 0:
        rank.mark(rank.rank)
        for i in range(rounds):
            rank.finish(rank.send(np.array([rank.rank, i]), 0, 3))
        return
    rank.await_mark(*range(1, rank.size))  # else one may have sent half of all before another has begun
    seen: list[int] = []
    for _ in range(rounds * (rank.size - 1)):
        array = np.zeros(2, np.int64)
        handle = rank.receive(array, None, 3)
        rank.context.wait(handle)
        source = rank.context.source(handle)
        rank.context.release(handle)
        assert array.tolist() == [source, seen.count(source)]
        seen.append(source)
    assert Counter(seen) == dict.fromkeys(range(1, rank.size), rounds)
    last = {source: len(seen) - 1 - seen[::-1].index(source) for source in range(1, rank.size)}
    if len(hosts) == 1:  # else they take different times
        assert min(last.values()) >= len(seen) // 2  # none was left to the end


@on_ranks([3], [1, 2], [1, 1, 1])
def test_any_rank_and_a_named_one_take_sends_in_the_order_of_their_receives(rank: Rank) -> None:
    if rank.rank > 0:
        if rank.rank == 2:
            rank.finish(rank.receive(np.zeros(1), 0, 1))
        rank.finish(rank.send(np.full(1, float(rank.rank)), 0), rank.send(np.full(1, rank.rank + 10.0), 0))
        return
    arrays = [np.zeros(1) for _ in range(4)]
    handles = [rank.receive(array, peer) for array, peer in zip(arrays, (None, 2, 1, None), strict=True)]
    rank.context.wait(handles[0])  # of rank 1, the only one that sends
    rank.finish(rank.send(np.zeros(1), 2, 1))
    for handle in handles[1:]:
        rank.context.wait(handle)
    assert [rank.context.source(handle) for handle in handles] == [1, 2, 1, 2]
    assert [array[0] for array in arrays] == [1, 2, 11, 12]
    for handle in handles:
        rank.context.release(handle)


@dataclass
class Schedule:
    """Moves (source, target, tag, place among those of these three, bytes), which each rank begins in an order of its
    own that keeps the order of those three.
    """

    seed: int
    size: int
    moves: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        places: Counter[tuple[int, int, int]] = Counter()
        for _ in range(chance.choice([10, 60, 150])):
            source, target = chance.sample(range(self.size), 2)
            tag = chance.choice([0, 1, 2, 2**31 - 1])
            size = chance.choice(SIZES)
            self.moves.append((source, target, tag, places[source, target, tag], size))
            places[source, target, tag] += 1

    def of(self, rank: int) -> list[tuple[int, int, int, int, int]]:
        chance = random.Random(self.seed * 1000 + rank)
        queues = defaultdict(list)
        for move in self.moves:
            if rank in move[:2]:
                queues[move[:3]].append(move)
        order = [key for key, queue in queues.items() for _ in queue]
        chance.shuffle(order)
        return [queues[key].pop(0) for key in order]

    def run(self, rank: Rank) -> None:
        """Begins all in that order and waits in another one, with collectives in between."""
        chance = random.Random(self.seed * 1000 + 500 + rank.rank)
        begun, collective = [], np.ones(1000)
        for source, target, tag, place, size in self.of(rank.rank):
            key, sends = (self.seed, source, target, tag, place), source == rank.rank
            array = content(key, size).copy() if sends else np.zeros(size, np.uint8)
            handle = rank.send(array, target, tag) if sends else rank.receive(array, source, tag)
            begun.append((handle, array, key))
        rank.allreduce(collective)
        assert np.all(collective == rank.size)
        chance.shuffle(begun)
        for handle, array, key in begun:
            rank.finish(handle)
            assert np.array_equal(array, content(key, len(array))), key


@pytest.mark.parametrize("seed", range(8))
@ways
def test_random_schedules_end_with_every_byte_in_place(seed: int, direct_bytes: int, hosts: list[int]) -> None:
    """Also where leaders have to pass on what is none of theirs."""
    for i in range(4):
        size = 2 + (seed + i) % 3
        several = [[1, size - 1], [size - 1, 1], [1] * size, [1, size, 1]]
        layout = [size] if len(hosts) == 1 else several[(seed + i) % 4]
        schedule = Schedule(seed * 100 + i, sum(layout))
        run_ranks(schedule.run, layout, direct_bytes=direct_bytes, spin_us=50 * (seed % 2))


@ways
@on_ranks("direct_bytes", "hosts")
def test_more_sends_than_the_ring_takes_wait_for_a_late_receiver(rank: Rank) -> None:
    arrays = [np.full(1000, i, np.int32) for i in range(100)]
    last = rank.size - 1
    if rank.rank == 0:
        handles = [rank.send(array, last, i) for i, array in enumerate(arrays)]
        rank.barrier()
        assert rank.context.in_progress(handles[0])
        rank.barrier()
        rank.finish(*handles)
        return
    rank.barrier()
    rank.barrier()  # it was seen to wait
    if rank.rank == last:
        for i in reversed(range(len(arrays))):
            got = np.zeros(1000, np.int32)
            rank.finish(rank.receive(got, 0, i))
            assert np.array_equal(got, arrays[i])


# ---- Errors ----


@on_ranks([2], [1, 1])
def test_unlike_tensors_fail_at_both_ends_and_the_next_ones_are_moved(rank: Rank) -> None:
    cases = [
        (np.zeros(4, np.float32), np.zeros(8, np.int64), ["sends 4 values of float32", "receives 8 values of int64"]),
        (np.zeros(4, np.float32), np.zeros(5, np.float32), ["sends 4 values", "receives 5 values of float32"]),
        (np.zeros(1 << 20, np.uint8), np.zeros(0, np.uint8), ["sends 1048576 values", "receives 0 values of uint8"]),
    ]
    for mine, other, texts in cases:
        with pytest.raises(MismatchError) as raised:
            rank.finish(rank.send(mine, 1, 9) if rank.rank == 0 else rank.receive(other, 0, 9))
        for text in [*texts, "tag 9", r"rank 0 \(host0\) sends", r"rank 1 \(host\d\) receives"]:
            assert re.search(text, str(raised.value))
    value = np.full((2, 3), rank.rank)
    rank.finish(rank.send(value, 1) if rank.rank == 0 else rank.receive(value.T, 0))
    assert np.all(value == 0)


@on_ranks([2])
def test_calls_that_name_no_other_rank_or_no_tag_are_refused_and_waits_may_end_early(rank: Rank) -> None:
    array = np.zeros(1)
    peer = 1 - rank.rank
    for begin in (rank.send, rank.receive):
        with pytest.raises(UsageError, match="rank 2 does not exist; ranks are 0 to 1"):
            begin(array, 2)
        with pytest.raises(UsageError, match=f"rank {rank.rank} is this rank itself"):
            begin(array, rank.rank)
        with pytest.raises(UsageError, match="tag -1; tags are 0 or more"):
            begin(array, peer, -1)
    with pytest.raises(UsageError, match="rank -1 does not exist"):
        rank.send(array, -1)
    handle = rank.submit("barrier", "b", [])
    assert rank.context.source(handle) < 0
    rank.finish(handle)
    array = np.full(3, float(rank.rank))  # a wait that is over leaves the receive running
    if rank.rank == 1:
        handle = rank.receive(array, 0)
        with pytest.raises(AbortedError, match="not all ranks have come in time"):
            rank.context.wait(handle, within_s=0.01)
        rank.barrier()
        rank.finish(handle)
        assert np.all(array == 0)
    else:
        rank.barrier()
        rank.finish(rank.send(array, 1))


@pytest.mark.parametrize("size", [1, 1 << 20])
@ways
@on_ranks("hosts", "direct_bytes")
def test_a_rank_that_dies_fails_what_is_pending_with_its_name(rank: Rank, size: int) -> None:
    if rank.rank > 2:
        return
    if rank.rank == 2:
        wait_for(lambda: all(rank.group.contexts[other].count_of("receive") == 2 for other in range(2)))
        rank.group.kill(2)
        return
    handles = [rank.send(np.zeros(size, np.uint8), 2), rank.receive(np.zeros(size, np.uint8), None, 1)]
    handles.append(rank.receive(np.zeros(size, np.uint8), 1 - rank.rank, 2))
    for handle in handles:
        with pytest.raises(PeerLostError, match=r"rank 2 \(host\d\) is gone"):
            rank.finish(handle)
    with pytest.raises(PeerLostError, match=r"rank 2 \(host\d\) is gone"):
        rank.send(np.zeros(1), 1 - rank.rank)


def leave(group: Group, rank: int) -> None:
    """Until all others know that it has left."""
    group.leave(rank)
    wait_for(lambda: all(each.health() is not None for each in group.contexts if each._context))


on_one_host = pytest.mark.parametrize("direct_bytes", [0, 1], ids=["by the ring", "direct"])


@on_one_host
def test_ranks_that_stay_send_and_receive_when_others_have_left(direct_bytes: int) -> None:
    with Group([4], direct_bytes=direct_bytes) as group:
        ranks = [Rank(context) for context in group.contexts]
        size = 3_000_000
        early, late = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        receive, collective = ranks[1].receive(early, 2), ranks[1].submit("barrier", "b", [])
        leave(group, 0)
        with pytest.raises(AbortedError, match=r"rank 0 \(host0\) has shut horo down"):
            ranks[1].finish(collective)
        ranks[2].finish(ranks[2].send(content(1, size), 1))
        ranks[1].finish(receive)
        leave(group, 3)

        def exchange(rank: Rank) -> None:
            for i in range(50):
                peer, other = 3 - rank.rank, np.zeros(1 + i * 997, np.uint8)
                rank.finish(rank.receive(other, None if i % 2 else peer, i), rank.send(content(i, other.size), peer, i))
                assert np.array_equal(other, content(i, other.size))

        group.run(exchange, ranks=[1, 2])
        receive = ranks[1].receive(late, 2)
        group.run(lambda rank: rank.finish(rank.send(content(2, size), 1)), ranks=[2])
        ranks[1].finish(receive)
        assert np.array_equal(early, content(1, size))
        assert np.array_equal(late, content(2, size))


@on_one_host
def test_a_rank_that_leaves_ends_what_others_have_begun_with_it(direct_bytes: int) -> None:
    with Group([3], direct_bytes=direct_bytes) as group:
        ranks = [Rank(context) for context in group.contexts]
        arrays = [np.zeros(1 << 20, np.uint8) for _ in range(4)]
        pending = [ranks[1].receive(arrays[0], 0), ranks[1].send(arrays[1], 0), ranks[1].receive(arrays[2])]
        leave(group, 0)
        for handle, name in zip(pending[:2], ("receive from rank 0, tag 0", "send to rank 0, tag 0"), strict=True):
            with pytest.raises(AbortedError, match=rf"rank 0 \(host0\) has shut horo down; pending here: '{name}'"):
                ranks[1].finish(handle)
        with pytest.raises(AbortedError, match=r"rank 0 \(host0\) has shut horo down"):
            ranks[1].finish(ranks[1].send(arrays[3], 0))
        assert ranks[1].context.in_progress(pending[2])  # rank 2 may still send
        leave(group, 2)
        with pytest.raises(AbortedError, match=r"has shut horo down; pending here: 'receive from any rank, tag 0'"):
            ranks[1].finish(pending[2])


@on_one_host
@pytest.mark.parametrize("other", [0, 2])
def test_what_others_have_begun_with_a_rank_ends_with_the_error_that_has_ended_the_group(
    direct_bytes: int, other: int
) -> None:
    """Also where the other rank has left in consequence."""
    with Group([3], direct_bytes=direct_bytes) as group:
        ranks = [Rank(context) for context in group.contexts]
        pending = [ranks[1].receive(np.zeros(9), other), ranks[1].send(np.zeros(1 << 20), other)]
        ranks[0].context.end("ValueError: 50% of %s")
        leave(group, 2)
        for handle in pending:
            with pytest.raises(
                PeerLostError, match=r"rank 0 \(host0\) ended with ValueError: 50% of %s; pending here: '"
            ):
                ranks[1].finish(handle)


def test_between_hosts_a_rank_that_leaves_ends_what_is_pending() -> None:
    with Group([2, 2]) as group:
        ranks = [Rank(context) for context in group.contexts]
        got = np.zeros(100_000)
        far, near = ranks[1].receive(np.zeros(9), 2), ranks[2].receive(got, 3)
        leave(group, 0)
        with pytest.raises(AbortedError, match=r"rank 0 \(host0\) has shut horo down.*receive from rank 2, tag 0"):
            ranks[1].finish(far)
        with pytest.raises(AbortedError, match=r"rank 0 \(host0\) has shut horo down.*send to rank 1, tag 0"):
            ranks[3].finish(ranks[3].send(np.zeros(9), 1))
        ranks[3].finish(ranks[3].send(np.ones(100_000), 2))
        ranks[2].finish(near)
        assert np.all(got == 1)


@on_one_host
@pytest.mark.parametrize("first", [True, False])
def test_what_a_rank_that_leaves_has_sent_may_still_be_received(direct_bytes: int, first: bool) -> None:
    with Group([3], direct_bytes=direct_bytes) as group:
        ranks = [Rank(context) for context in group.contexts]
        got = np.zeros(1 << 20, np.uint8)
        ranks[0].send(content(3, got.size).copy(), 1)
        if not first:
            leave(group, 2)
        leaving = threading.Thread(target=group.leave, args=(0,))
        leaving.start()
        ranks[1].finish(ranks[1].receive(got, 0))
        leaving.join()
        assert np.array_equal(got, content(3, got.size))


def test_a_rank_waits_no_longer_for_its_sends_when_another_leaves_meanwhile() -> None:
    with Group([3], stall_warning_ms=0) as group:
        Rank(group.contexts[0]).send(np.zeros(9), 1)
        leaving = threading.Thread(target=group.leave, args=(0,), daemon=True)
        leaving.start()
        wait_for(lambda: not group.contexts[0]._context)
        group.leave(2)
        leaving.join(60)
        assert not leaving.is_alive()


KILLED_BEHIND_THE_END = """
from horo.errors import AbortedError

rank, others = forked([4], stall_warning_ms=0)
rank.barrier()
pending = rank.receive(np.ones(1), 2) if rank.rank == 3 else 0
if rank.rank == 1:
    rank.context.destroy()
    os._exit(0)
if rank.rank == 0:
    for _ in others:
        os.wait()
    os._exit(0)
wait_for(lambda: rank.context.health() is not None)
if rank.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    rank.finish(pending)
except AbortedError as error:
    print(error, flush=True)
os._exit(0)
"""


def test_a_rank_that_is_killed_when_another_has_left_ends_what_is_pending_with_it() -> None:
    said = run_script(KILLED_BEHIND_THE_END)
    assert re.match(r"rank 2 \(host0\) has shut horo down; pending here: 'receive from rank 2, tag 0'", said), said


LEAVER = """
rank, others = forked([2], stall_warning_ms=0)
array = np.ones(1)
if rank.rank == 1:
    sent = rank.send(array, 0)
    rank.finish(rank.send(array, 0, 7))
    os.kill(os.getpid(), signal.SIGSTOP)
    rank.finish(sent)
    print("finished", flush=True)
    os._exit(0)
rank.finish(rank.receive(array, 1, 7))
os.waitpid(others[1], os.WUNTRACED)
full = [np.ones(1000, np.int32) for _ in range(30)]
for each in full:  # more than the ring takes: what comes behind waits for room
    rank.send(each, 1, 1)
rank.finish(rank.receive(array, 1))
threading.Timer(0.3, os.kill, (others[1], signal.SIGCONT)).start()
rank.context.destroy()
os.waitpid(others[1], 0)
"""


def test_a_rank_that_leaves_tells_the_sender_that_it_has_all() -> None:
    assert run_script(LEAVER) == "finished\n"


LEAVER_BEHIND_A_LEADER = """
from horo.errors import AbortedError

rank, others = forked([1, 2], 2, stall_warning_ms=0)
array = np.ones(1)
if rank.rank == 0:
    sent = [rank.send(array, 2) for _ in range(100)]
    rank.finish(rank.send(array, 2, 7), *sent)
    print("finished", flush=True)
    os._exit(0)
if rank.rank == 1:
    try:
        rank.finish(rank.receive(array, 0, 1))
    except AbortedError:
        os._exit(0)
rank.finish(rank.receive(array, 0, 7))
os.kill(others[1], signal.SIGSTOP)
os.waitpid(others[1], os.WUNTRACED)
rank.finish(*(rank.receive(array, 0) for _ in range(100)))
threading.Timer(0.3, os.kill, (others[1], signal.SIGCONT)).start()
rank.context.destroy()
for process in others.values():
    os.waitpid(process, 0)
"""


def test_its_leader_passes_that_on_before_it_tells_of_the_leaving() -> None:
    assert run_script(LEAVER_BEHIND_A_LEADER) == "finished\n"


def test_what_is_pending_here_ends_with_a_shutdown() -> None:
    with Group([2]) as group:
        pending = Rank(group.contexts[0]).receive(np.zeros(9), 1)
        group.contexts[0].end("", has_failed=False)
        with pytest.raises(AbortedError, match="horo was shut down on this rank before the operation finished"):
            group.contexts[0].finish(pending)
        with pytest.raises(AbortedError):
            Rank(group.contexts[0]).send(np.zeros(9), 1)


def test_nothing_happens_while_a_receive_waits() -> None:
    quiet = threading.Event()
    with Group([2], stall_warning_ms=0) as group:
        array = np.zeros(3)
        sender, receiver = Rank(group.contexts[1]), Rank(group.contexts[0])
        handle = receiver.receive(array, 1)
        for _ in range(10):  # on a busy machine a thread may come to rest only in a later round
            before = [context.counters() for context in group.contexts]
            quiet.wait(0.5)
            after = [context.counters() for context in group.contexts]
            if after == before:
                break
        assert after == before
        sender.finish(sender.send(np.ones(3), 0))
        receiver.finish(handle)
        assert np.all(array == 1)


@pytest.mark.skipif(bool(os.environ.get("HORO_SANITIZE")), reason="the sanitizer is loaded in the place of the double")
@pytest.mark.parametrize(
    "defines",
    [{"REFUSED": errno.EPERM}, {"REFUSED": errno.EFAULT, "AFTER": 2}, {"PIECE": 51_700}],
    ids=["forbidden", "in the middle", "in parts"],
)
def test_memory_that_cannot_be_read_goes_by_the_ring(tmp_path: Path, defines: dict[str, int]) -> None:
    double = build_double("libpeer_memory.so", tmp_path, **defines)
    script = "from test_pairs import Schedule, run_ranks; run_ranks(Schedule(1, 3).run, [3], direct_bytes=1)"
    run_script(script, LD_PRELOAD=str(double))
