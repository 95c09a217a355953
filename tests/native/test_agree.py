"""What ranks agree on: names known by an id, differences, sizes of requests; control messages and batches at once."""

import itertools
import os
import random
import re
import socket
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import fabric
import native_build
import numpy as np
import pytest
from ranks import SUM, Rank, Written, describe, on_ranks, wait_for
from test_gather import gather

from horo.core import context
from horo.core.context import RequestBuffer
from horo.core.setup import Setup, close_all
from horo.errors import HoroError, MismatchError, PeerLostError, UsageError


def hits(rank: Rank, names: Sequence[str]) -> int:
    """How many of these, one after another, are announced by id."""
    before = rank.context.counters()["cache_hits"]
    for name in names:
        rank.run("barrier", name, [])
    return rank.context.counters()["cache_hits"] - before


@pytest.mark.parametrize("count", [65, 80, 256])
@on_ranks([1], cache_capacity=64)
def test_a_cache_too_small_for_all_names_of_a_step_serves_those_it_holds(rank: Rank, count: int) -> None:
    """Who evicts for every newcomer has no hit in such a cycle; nobody can have more than the capacity."""
    assert [hits(rank, [f"n{i}" for i in range(count)]) for _ in range(20)] == [0] + [64] * 19


@on_ranks([1], cache_capacity=64)
def test_names_that_are_not_used_any_more_make_room_in_the_end(rank: Rank) -> None:
    """Also among ones that are used once, of which whoever lets in one of a number may let in only those."""
    hits(rank, [f"start{i}" for i in range(1000)])
    names = [f"n{i}" for i in range(50)]
    assert hits(rank, names) == 0
    for _ in range(400):
        hits(rank, names)
    assert hits(rank, names) == 50
    for step in range(1200):
        hits(rank, [f"step{step}", "loss"])
    assert hits(rank, ["loss"]) == 1


@on_ranks([1], fusion_bytes=1 << 40, cycle_time_us=2_000_000)
def test_a_batch_of_the_longest_names_is_a_message_of_allowed_size(rank: Rank) -> None:
    """Of 70,000 names that are ready at once, a message has room for 65,000."""
    array = np.ones(70_000, np.uint8)
    names = [f"{i:01023d}" for i in range(len(array))]
    submit = partial(rank.submit, "allreduce", reduce_op=1, transient=True)
    rank.finish(*[submit(name, [array[i : i + 1]]) for i, name in enumerate(names)])


FACTORS = {
    (0.5, 0.25): ("0.5", "0.25"),
    (0.1, 0.1 + 1e-12): ("0.1", "0.100000000001"),
    (1 / 3, 1 / 3 + 2**-54): ("0.3333333333333333", "0.3333333333333334"),
    (1e300, -0.0): ("1e+300", "-0"),
}


@pytest.mark.parametrize("place", ["prescale", "postscale"])
@on_ranks([2])
def test_factors_that_differ_read_as_different(rank: Rank, place: str) -> None:
    for factors, said in FACTORS.items():
        one, other = ({"prescale": "1", "postscale": "1", place: value} for value in said)
        texts = [f"prescale factor {e['prescale']} and postscale factor {e['postscale']}" for e in (one, other)]
        expected = rf"rank 0 \(host0\) sent {re.escape(texts[0])}, rank 1 \(host0\) sent {re.escape(texts[1])}"
        with pytest.raises(MismatchError, match=expected):
            rank.allreduce(np.ones(2), f"x{factors}", **{place: factors[rank.rank]})


TEAMS = [
    ([0, 1], [1], "[0, 1]", "[1]"),
    (range(40), [*range(38), 39], "[..., 36, 37, 38, 39]", "[..., 36, 37, 39]"),
    (range(40), range(39), "[..., 37, 38, 39]", "[..., 37, 38]"),
    (range(5, 40), range(6, 40), f"{[*range(5, 25)]}"[:-1] + ", ...]", f"{[*range(6, 26)]}"[:-1] + ", ...]"),
]


@on_ranks([40], segment_bytes=1 << 12)
def test_teams_that_differ_read_as_different(rank: Rank) -> None:
    for one, other, *said in TEAMS:
        expected = f"rank 0 (host0) calls add_process_set for the ranks {said[0]}, rank 1 (host0) "
        expected += f"add_process_set for the ranks {said[1]}; all ranks must add and remove the same"
        with pytest.raises(MismatchError, match=re.escape(expected)):
            rank.context.add_team([*(other if rank.rank == 1 else one)])


@on_ranks([2], [1, 2])
def test_rows_that_no_message_can_hold_fail_for_all_ranks(rank: Rank) -> None:
    """A leader that cannot pass them on says so instead."""
    count = 127_000
    tensor = context.Tensor(64, 64, (2**61, 0, *[1] * 62), context.DTYPES["float32"])
    request = context.RequestBuffer.of(context.OPS["allgather"], "g", [tensor] * count)
    text = f"allgather 'g': the first extents of its {count} tensors on [23] ranks take .* can travel as one request"
    handle = rank.context.submit(request)
    with pytest.raises(Exception, match=text):
        rank.context.wait(handle)
    rank.context.release(handle)
    assert rank.allreduce(np.ones(3)).tolist() == [rank.size] * 3


@on_ranks([3], [1, 1], cache_capacity=5000)
def test_as_many_names_are_cached_as_the_capacity_says(rank: Rank) -> None:
    for step in range(3):
        rank.finish(*[rank.submit("barrier", f"n{i}", []) for i in range(5000)])
        assert rank.context.counters()["cache_hits"] == step * 5000


@pytest.mark.parametrize("early", [0, 1, 2])
@on_ranks([3], [1, 1, 1], [2, 1], [1, 2], cache_capacity=2)
def test_a_name_that_waits_while_others_take_its_place_in_the_cache_is_announced_anew(rank: Rank, early: int) -> None:
    for turn in range(4):
        for _ in range(2):
            assert (rank.allreduce(np.ones(3), "x") == 3).all()
        waiting = [np.ones(3)]
        handle = rank.submit("allreduce", "x", waiting, reduce_op=1) if rank.rank == early else 0
        for number in range(100):  # of which a few are let in
            rank.barrier(f"{turn} {number}")
        if rank.rank == early:
            rank.finish(handle)
            assert (waiting[0] == 3).all()
        else:
            assert (rank.allreduce(np.ones(3), "x") == 3).all()


@on_ranks([3], stall_warning_ms=2000)
def test_a_rank_that_is_late_is_named_also_after_more_names_than_it_can_show(rank: Rank, written: Written) -> None:
    """The leader is late itself and parked, so rank 1 must tell by what the others show."""
    handles = [rank.submit("barrier", f"n{i}", []) for i in range(6000)]
    rank.finish(*handles)
    if rank.rank == 0:
        wait_for(lambda: "rank 0 (host0) has not submitted 'late'" in written())
    rank.barrier("late")


REQUEST_MAX = (64 << 20) - 11 - 65535 - 9  # in a message with the longest text that may go with it
DIMS_MAX = 64
FIXED_BYTES, TENSOR_BYTES = 29, 3 + 8 * DIMS_MAX
LAST = np.zeros((2, 3), np.float32)
"""By rank, what the last tensor of the largest request holds."""


def request_of(byte_count: int, rank: int = 0) -> context.RequestBuffer:
    """A group of tensors without elements, but for the last one, whose canonical form takes so many bytes."""
    count = (byte_count - FIXED_BYTES - 1) // TENSOR_BYTES
    name = "n" * (byte_count - FIXED_BYTES - count * TENSOR_BYTES)
    tensor = context.Tensor(64, 64, (0,) * DIMS_MAX, context.DTYPES["float32"])
    tensors = [tensor] * count
    tensors[-1] = describe([LAST[rank]], [LAST[rank]])[0]._replace(shape=(1,) * (DIMS_MAX - 1) + (3,))
    return context.RequestBuffer.of(context.OPS["allreduce"], name, tensors, reduce_op=1)


@pytest.mark.parametrize("byte_count", [REQUEST_MAX + 1, 65 << 20])
@on_ranks([1, 1])
def test_a_request_that_could_not_travel_is_refused_with_its_size(rank: Rank, byte_count: int) -> None:
    if rank.rank == 1:
        with pytest.raises(UsageError, match=f"takes {byte_count} bytes.* at most {REQUEST_MAX}.* several groups"):
            rank.context.submit(request_of(byte_count))
    assert rank.allreduce(np.ones(3)).tolist() == [2.0] * 3


@pytest.mark.skipif(native_build.FLAVOUR == "thread", reason="what is looked for is memory, which the other one checks")
@on_ranks([2], [1, 1])
def test_the_largest_request_is_agreed_on(rank: Rank) -> None:
    LAST[rank.rank] = 1 + 9 * rank.rank
    rank.finish(rank.context.submit(request_of(REQUEST_MAX, rank.rank)))
    assert LAST[rank.rank].tolist() == [11.0] * 3


HUGE = 1 << 31
EMPTY = [(0,), (0, 5), (5, 0), (0, HUGE, HUGE), (HUGE, HUGE, 0), (HUGE, 0, HUGE), (0, 1 << 62, 1 << 62, 1 << 62)]
LAYOUTS = [[1], [2], [1, 1], [2, 1]]


def run(rank: Rank, op: str, name: str, shape: tuple[int, ...], **options: int) -> None:
    """On memory that nobody may touch."""
    tensor = context.Tensor(64, 64, shape, context.DTYPES["float32"])
    rank.context.run(context.RequestBuffer.of(context.OPS[op], name, [tensor], sync=True, **options))


@on_ranks(*LAYOUTS)
def test_a_tensor_without_elements_is_reduced_broadcast_and_gathered(rank: Rank) -> None:
    for shape, step in itertools.product(EMPTY, range(2)):  # in full, then by id
        run(rank, "allreduce", f"x{shape}", shape, reduce_op=step)
        run(rank, "reducescatter", f"s{shape}", shape, reduce_op=step)
        run(rank, "broadcast", f"b{shape}", shape)
    for rows in ((0,), (HUGE, HUGE, 0), (0, HUGE, HUGE, HUGE)):
        assert gather(rank, [(rank.rank + 1, *rows)], "float32") == [r + 1 for r in range(rank.size)]
    assert gather(rank, [(0, HUGE)], "float32") == [0] * rank.size


@pytest.mark.parametrize(
    ("op", "shape", "dimension"),
    [
        ("allreduce", (HUGE, HUGE), 1), ("broadcast", (1, 1 << 61), 1), ("reducescatter", (HUGE, HUGE), 1),
        ("allreduce", (0, -1), 1), ("allgather", (0, HUGE, HUGE), 2), ("allgather", (HUGE, HUGE), 1),
        ("allgather", (0, -1, 0), 1), ("alltoall", (0, HUGE, HUGE), 2),
    ],
)  # fmt: skip
@on_ranks([2])
def test_shapes_of_too_many_bytes_are_refused(rank: Rank, op: str, shape: tuple[int, ...], dimension: int) -> None:
    """One row of an allgather must fit even where there is none: another rank may have some."""
    with pytest.raises(UsageError, match=f"extent {shape[dimension]} of dimension {dimension} is impossible"):
        tensor = context.Tensor(64, 64, shape, context.DTYPES["float32"])
        rank.context.submit(context.RequestBuffer.of(context.OPS[op], "x", [tensor]))
    rank.barrier()


ROUNDS = int(os.environ.get("HORO_TEST_ROUNDS", "300" if native_build.FLAVOUR else "500"))
"""How often what goes wrong once in thousands of times is tried."""


def reduction(name: str, array: np.ndarray) -> RequestBuffer:
    return RequestBuffer.of(context.OPS["allreduce"], name, describe([array], [array]), reduce_op=SUM)


def await_all(rank: Rank, *handles: int) -> None:
    """Polls, so that nobody but the background threads drives; ends early when another rank has given up."""
    end, done = time.monotonic() + 60, 0
    while done < len(handles):
        done += rank.context.poll(handles[done])
        if time.monotonic() > end or rank.group.together.broken:
            pending = [place for place, handle in enumerate(handles) if not rank.context.poll(handle)]
            raise TimeoutError(f"rank {rank.rank} waits for ever for {len(pending)} of {len(handles)}: {pending[:6]}")
        time.sleep(0)


@pytest.mark.parametrize(
    ("kind", "hosts"), [("empty", [1, 1]), ("barrier", [1, 1, 1]), ("barrier", [2, 1]), ("mismatch", [2, 1])], ids=str
)
@on_ranks("hosts", spin_us=1000, stall_warning_ms=0)
def test_what_is_over_at_once_does_not_hold_up_the_operation_behind_it(rank: Rank, kind: str) -> None:
    """The root submits last, so that its engine decides on the first and runs the second in one turn."""
    array = np.ones(64, np.float32)
    count = rank.rank + 1 if kind == "mismatch" else 0
    first, second = reduction("now", np.zeros(count, np.float32)), reduction("then", array)
    if kind == "barrier":
        first = RequestBuffer.of(context.OPS["barrier"], "now")
    chance = random.Random(rank.rank)
    for step in range(ROUNDS):
        array[:] = step % 7
        rank.meet()
        begin, delay_s = time.perf_counter(), chance.uniform(1e-4, 4e-4) if rank.rank == 0 else 0.0
        while time.perf_counter() - begin < delay_s:
            time.sleep(0)
        handles = [rank.context.submit(first), rank.context.submit(second)]
        await_all(rank, *handles)
        with pytest.raises(MismatchError, match="'now'") if kind == "mismatch" else nullcontext():
            rank.context.wait(handles[0])
        rank.context.wait(handles[1])
        assert (array == rank.size * (step % 7)).all(), step
        for handle in handles:
            rank.context.release(handle)


@pytest.mark.parametrize(("hosts", "late"), [([1, 1], 0), ([2, 1], 0), ([2, 1], 1)], ids=str)
@on_ranks("hosts", stall_warning_ms=0)
def test_thousands_of_new_names_pass_while_a_batch_runs(rank: Rank, late: int) -> None:
    """All but one rank wait for all names; the last one announces them while a large batch keeps everybody."""
    # Under a sanitizer a sum takes as long. The names are several times what a link takes.
    count, names = 6_000_000 if native_build.FLAVOUR else 15_000_000, 8000
    big = np.ones(count, np.float32)
    small = [np.full(1, rank.rank + 1, np.float32) for _ in range(names)]
    requests = [reduction(f"{i:06d}".ljust(80, "x"), array) for i, array in enumerate(small)]
    handles = []
    if rank.rank != late:
        handles = [rank.context.submit(request) for request in requests]
    rank.barrier("known")  # behind the names on every link, so all have been heard of
    handles.append(rank.context.submit(reduction("big", big)))
    if rank.rank == late:
        handles += [rank.context.submit(request) for request in requests]
    await_all(rank, *handles)
    rank.finish(*handles)
    assert (big == rank.size).all()
    assert all(array[0] == rank.size * (rank.size + 1) / 2 for array in small)


@on_ranks([1, 2], tcp=True, relay=fabric.Relay(data_chunk_bytes=1 << 17, chunk_pause_s=0.01))
def test_a_death_beside_a_leader_ends_the_batch_on_all_hosts(rank: Rank) -> None:
    """Rank 2 has no link to rank 0, and rank 1, which sees it die, stays; so rank 0 must be told. It takes seconds."""
    array = np.ones(10_000_000, np.float32)
    handle = rank.submit("allreduce", "x", [array], reduce_op=SUM)
    if rank.rank == 2:
        wait_for(lambda: array[0] == 3)
        rank.group.kill(2)
        with pytest.raises(HoroError):
            rank.finish(handle)  # its engine lives on, and uses the array until then
        return
    with pytest.raises(PeerLostError, match=r"rank 2 \(host1\)"):
        rank.finish(handle)
    assert isinstance(rank.context.health(), PeerLostError)


SLOWLY = fabric.Relay(data_chunk_bytes=1 << 15, chunk_pause_s=0.016)
"""2 MiB/s: small data, a long batch."""


def narrow(setups: list[Setup]) -> list[Setup]:
    """The control link between two hosts of one rank is a TCP connection that takes in little before it is read."""
    close_all([setup.control_fds[1 - setup.rank] for setup in setups])
    with socket.socket() as listener, socket.socket() as dialed:
        for end in (listener, dialed):  # before they are connected, so that the window is right from the start
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        dialed.connect(listener.getsockname())
        made = [[-1, listener.accept()[0].detach()], [dialed.dup().detach(), -1]]
    return [replace(setup, control_fds=fds) for setup, fds in zip(setups, made, strict=True)]


@pytest.mark.parametrize("announcer", [0, 1])
@on_ranks([1, 1], tcp=True, peer_timeout_ms=5000, relay=SLOWLY, rewire=narrow)
def test_announcements_may_wait_for_longer_than_the_peer_timeout_while_a_batch_runs(rank: Rank, announcer: int) -> None:
    arrays: list[np.ndarray] = [np.ones(1 << 20, np.float32), np.ones(3 << 20, np.float64)]
    handles = [rank.context.submit(reduction(f"long{i}", array)) for i, array in enumerate(arrays)]
    small = [np.ones(1, np.float32) for _ in range(8000)]
    requests = [reduction(f"{i:06d}".ljust(100, "n"), array) for i, array in enumerate(small)]
    wait_for(lambda: arrays[0][0] == 2)  # in the midst of the first; dtypes keep the second out of it
    rank.meet()
    if rank.rank == announcer:
        handles += [rank.context.submit(request) for request in requests]
    for handle in handles[:2]:
        rank.context.wait(handle)
    assert all((array == 2).all() for array in arrays)
    if rank.rank != announcer:
        handles += [rank.context.submit(request) for request in requests]
    for handle in handles:
        rank.context.wait(handle)
    assert all(array[0] == 2 for array in small)
