"""Data between hosts over several sockets per peer: all collectives, their sleep, and the loss of one socket."""

from __future__ import annotations

import os
import socket

import known_answers
import numpy as np
import pytest
from descriptors import open_descriptors
from fabric import make_setups
from ranks import Group, Rank

from horo.core.context import Context
from horo.errors import PeerLostError

PIECE_BYTES = 1 << 17


def collectives(rank: Rank) -> None:
    """With sizes of one piece and of many, at once."""
    for step, size in enumerate((1, 2, 3, 1000, 4097, 300_000)):
        known_answers.collectives(rank, step)
        large = np.arange(size, dtype=np.float64)
        for number in range(3):
            whole = rank.allreduce(large * (rank.rank + 1), f"{size} {number}")
            assert np.array_equal(whole, large * (rank.size * (rank.size + 1) // 2))
        for root in range(rank.size):
            assert set(rank.broadcast(np.full(size, rank.rank, np.int32), root)) == {root}


@pytest.mark.parametrize("sockets", [2, 8])
def test_waits_sleep_on_every_socket(sockets: int) -> None:
    """Nobody spins, and segments of many pieces keep all sockets busy."""
    hosts, options = [1, 1, 1], {"sockets_per_peer": sockets, "spin_us": 0, "segment_bytes": 1 << 21}
    with Group(hosts, tcp=True, **options) as group:
        group.run(collectives)
        assert all(context.counters()["sleeps"] > 0 for context in group.contexts)
        for rank in range(len(hosts)):
            received = [received_bytes(group.data_end(rank, number)) for number in range(2 * sockets)]
            assert min(received) > 0, received


def test_the_bytes_are_shared_among_the_sockets() -> None:
    values = np.ones(1 << 20, np.float32)
    setups = make_setups([1, 1], sockets_per_peer=4, tcp=True, segment_bytes=1 << 20)
    ends = [socket.socket(fileno=os.dup(fd)) for fd in setups[0].data_fds if fd >= 0]
    contexts = [Context(setup) for setup in setups]
    ranks = [Rank(context) for context in contexts]
    arrays = [values.copy(), values.copy()]
    handles = [rank.submit("allreduce", "x", [array], reduce_op=1) for rank, array in zip(ranks, arrays, strict=True)]
    for rank, handle in zip(ranks, handles, strict=True):
        rank.finish(handle)
    received = [received_bytes(end) for end in ends]
    assert sum(received) == values.nbytes  # the ring: half of them twice
    assert max(received) - min(received) <= PIECE_BYTES, received
    for end in ends:
        end.close()
    for context in contexts[::-1]:
        context.destroy()


def received_bytes(end: socket.socket) -> int:
    """tcpi_bytes_received of struct tcp_info in linux/tcp.h."""
    info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int.from_bytes(info[128:136], "little")


@pytest.mark.parametrize("hosts", [[1, 1], [2, 2]], ids=str)
@pytest.mark.parametrize("number", [0, 2])
def test_a_rank_that_loses_one_socket_is_lost(hosts: list[int], number: int) -> None:
    broken: list[socket.socket] = []

    def body(rank: Rank) -> str:
        with pytest.raises(PeerLostError) as caught:
            for turn in range(1000):
                if turn == 3 and rank.rank == 0:
                    broken[0].shutdown(socket.SHUT_RDWR)
                rank.allreduce(np.ones(200_000, np.float32))
        return str(caught.value)

    with Group(hosts, sockets_per_peer=3, tcp=True) as group:
        broken.append(group.data_end(0, number))
        said = group.run(body)
    assert all("rank 0" in text or f"rank {hosts[0]}" in text for text in said), said


def test_no_descriptor_is_left() -> None:
    before = open_descriptors()
    contexts = [Context(setup) for setup in make_setups([1, 1, 1], sockets_per_peer=3)]
    assert len(open_descriptors() - before) > 18
    for context in contexts:
        context.destroy()
    assert open_descriptors() <= before
