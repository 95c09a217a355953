"""What ranks compute does not depend on when bytes arrive: links that are late, or give them in pieces."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from ranks import Group, Rank, on_ranks
from slow_links import Relay

from horo.errors import AbortedError, MismatchError, PeerLostError

HOSTS = [[1, 1], [2, 2], [1, 2, 1], [3]]
RELAYS = {
    "late control": Relay(control_delay_s=0.004),
    "late data": Relay(data_delay_s=0.004),
    "control in pieces": Relay(control_chunk_bytes=7),
    "data in pieces": Relay(data_chunk_bytes=1009),
    "late and in pieces": Relay(
        control_delay_s=0.002, data_delay_s=0.003, control_chunk_bytes=61, data_chunk_bytes=5003
    ),
}
ROUNDS = 2

over_every_layout = pytest.mark.parametrize("hosts", HOSTS, ids=str)
over_every_relay = pytest.mark.parametrize("relay", RELAYS.values(), ids=RELAYS.keys())


def triangle(size: int) -> int:
    """1 + 2 + ... + size."""
    return size * (size + 1) // 2


def check_sum(rank: Rank, count: int, name: str) -> None:
    base = np.arange(count, dtype=np.int64) % 1000
    np.testing.assert_array_equal(rank.allreduce(base * (rank.rank + 1), name), base * triangle(rank.size))


def check_min(rank: Rank, count: int, name: str) -> None:
    base = np.arange(count, dtype=np.float32)
    lowest = rank.allreduce(base + (rank.rank * 7 + 3) % 5, name, "min")
    np.testing.assert_array_equal(lowest, base + min((r * 7 + 3) % 5 for r in range(rank.size)))


def check_broadcast(rank: Rank, count: int, root: int, name: str) -> None:
    mine = np.arange(count, dtype=np.int32) + rank.rank * 1000
    np.testing.assert_array_equal(rank.broadcast(mine, root, name), np.arange(count, dtype=np.int32) + root * 1000)


def check_allgather(rank: Rank, rows: int, name: str) -> None:
    """Rank r gives rows * r rows that all hold r: the first gives none."""
    whole, first_dims = rank.allgather(np.full((rows * rank.rank, 3), rank.rank, np.int16), name)
    assert first_dims == [rows * r for r in range(rank.size)]
    np.testing.assert_array_equal(
        whole, np.repeat(np.arange(rank.size, dtype=np.int16), first_dims)[:, None].repeat(3, 1)
    )


def check_bunch(rank: Rank, prefix: str, order: random.Random) -> None:
    """Small and large tensors at once, in another order on every rank."""
    counts = [1, 5, 1000, 3, 30_000, 17, 64, 2, 4096, 9]
    arrays = [np.full(count, (i + 1) * (rank.rank + 1), np.int64) for i, count in enumerate(counts)]
    numbers = list(range(len(counts)))
    order.shuffle(numbers)
    handles = [rank.submit("allreduce", f"{prefix}{i}", [arrays[i]], reduce_op=1) for i in numbers]
    gathers = rank.submit("allgather", f"{prefix}g", [np.full(2, rank.rank)])
    for handle in reversed(handles):
        rank.finish(handle)
    rank.finish(gathers)
    for i, array in enumerate(arrays):
        np.testing.assert_array_equal(array, np.full(counts[i], (i + 1) * triangle(rank.size)))


@over_every_layout
@over_every_relay
@on_ranks("hosts", "relay")
def test_every_collective_gives_its_result(rank: Rank) -> None:
    order = random.Random(rank.rank)
    for _ in range(ROUNDS):
        for count in (1, 1000, 40_000):
            check_sum(rank, count, f"sum{count}")
        check_min(rank, 5000, "min")
        for root in range(rank.size):
            check_broadcast(rank, 3000, root, f"from{root}")
        check_allgather(rank, 50, "rows")
        rank.barrier()
        check_bunch(rank, "bunch", order)


@over_every_layout
@over_every_relay
@on_ranks("hosts", "relay")
def test_calls_at_once_keep_their_order_on_every_rank(rank: Rank) -> None:
    """A synchronous call after each of a stream: what drives the engine changes with every one."""
    for step in range(20):
        arrays = [np.full(10 + i, step + i + rank.rank) for i in range(3)]
        handles = [rank.submit("allreduce", f"a{i}", [array], reduce_op=1) for i, array in enumerate(arrays)]
        x = np.full(4, float(step))
        rank.run("allreduce", "sync", [x], reduce_op=1)
        np.testing.assert_array_equal(x, np.full(4, float(step * rank.size)))
        rank.finish(*handles)
        for i, array in enumerate(arrays):
            expected = rank.size * (step + i) + triangle(rank.size - 1)
            np.testing.assert_array_equal(array, np.full(10 + i, expected))


@over_every_relay
@on_ranks([2, 2], "relay", tcp=True)
def test_over_tcp_too(rank: Rank) -> None:
    for _ in range(ROUNDS):
        check_sum(rank, 100_000, "large")
        check_allgather(rank, 3000, "rows")
        check_bunch(rank, "bunch", random.Random(rank.rank))


@over_every_relay
@on_ranks([2, 2], "relay")
def test_a_disagreement_is_told_to_all_and_the_group_goes_on(rank: Rank) -> None:
    for step in range(3):
        with pytest.raises(MismatchError, match=f"odd{step}"):
            rank.allreduce(np.zeros(3 if rank.rank == 2 else 4), f"odd{step}")
        check_sum(rank, 100, "after")


@over_every_layout
@over_every_relay
def test_a_rank_that_leaves_ends_the_waiting_of_the_others(hosts: list[int], relay: Relay) -> None:
    with Group(hosts, relay=relay) as group:
        last = sum(hosts) - 1

        def body(rank: Rank) -> None:
            check_sum(rank, 1000, "together")
            if rank.rank == last:
                group.contexts[last].destroy()
                return
            with pytest.raises(AbortedError, match=f"rank {last} .* has shut horo down"):
                while True:
                    rank.barrier()

        group.run(body)


@over_every_relay
@pytest.mark.parametrize("hosts", [[1, 1], [2, 2], [1, 2, 1]], ids=str)
@pytest.mark.parametrize("when", ["idle", "busy"])
def test_a_rank_that_dies_ends_the_waiting_of_the_others(hosts: list[int], when: str, relay: Relay) -> None:
    last = sum(hosts) - 1
    survivors = range(last)
    with Group(hosts, relay=relay) as group:
        group.run(lambda rank: check_sum(rank, 1000, "together"))
        count = 8 if when == "idle" else 400_000
        begun = threading.Barrier(len(survivors) + 1)

        def body(rank: Rank) -> None:
            begun.wait(30)
            with pytest.raises(PeerLostError):
                while True:
                    rank.allreduce(np.ones(count), "x")

        def die(_: Rank) -> None:
            begun.wait(30)
            group.kill(last)

        group.run(lambda rank: die(rank) if rank.rank == last else body(rank))


# ---- The relay itself ----
