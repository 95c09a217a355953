"""Control messages and batches at once: neither may wait for the other."""

import os
import random
import socket
import time
from contextlib import nullcontext
from dataclasses import replace

import native_build
import numpy as np
import pytest
import slow_links
from ranks import SUM, Rank, describe, on_ranks, wait_for

from horo.core import context
from horo.core.context import RequestBuffer
from horo.core.setup import Setup, close_all
from horo.errors import HoroError, MismatchError, PeerLostError

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
    ("kind", "hosts"),
    [("empty", [1, 1]), ("barrier", [1, 1, 1]), ("barrier", [2, 1]), ("mismatch", [2, 1])],
    ids=str,
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


@on_ranks([1, 2], tcp=True, relay=slow_links.Relay(data_chunk_bytes=1 << 17, chunk_pause_s=0.01))
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


SLOWLY = slow_links.Relay(data_chunk_bytes=1 << 15, chunk_pause_s=0.016)
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
