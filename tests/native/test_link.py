"""Links between hosts: which there are, several sockets per peer, and bytes that no leader sends or are damaged."""

import os
import random
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import ModuleType

import native_build
import numpy as np
import pytest
import wire_oracle as oracle
from fabric import close_setup, make_setups
from hypothesis import given
from hypothesis import strategies as st
from jobs import open_descriptors
from links import CONTROL, DATA
from ranks import Group, Rank, Written, on_ranks
from wire_oracle import framed

from horo.bootstrap.host.grouping import control_peers, data_peers
from horo.core.context import Context
from horo.core.setup import Setup
from horo.errors import HoroError, InternalError, PeerLostError, UsageError

FRAME_MAX = 64 << 20
NOISE = random.Random(3)
GATHER = oracle.request(oracle.Request("g", op=oracle.ALLGATHER, tensors=(oracle.Tensor(7, (0, 5)),) * 2))


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(framed(b""), id="nothing"),
        pytest.param((FRAME_MAX + 1).to_bytes(4, "little"), id="too long"),
        pytest.param(b"\xff" * 8, id="much too long"),
        pytest.param(framed(b"\xff" * 8), id="no message"),
        pytest.param(framed(oracle.lost_message(0, -40, 255)), id="a loss with an unknown reason"),
        pytest.param(framed(oracle.lost_message(-2, -40, 1)), id="a loss of no rank"),
        pytest.param(framed(oracle.lost_message(2, -40, 1)), id="a loss of a rank beyond the last"),
        pytest.param(framed(oracle.request_message(1, 0, b"", GATHER, [7, 7, 7])), id="rows of too many ranks"),
        pytest.param(framed(oracle.request_message(1, 0, b"", GATHER)), id="no rows"),
        pytest.param(framed(oracle.request_message(77, 0, b"", GATHER, [7, 7])), id="a request of no rank"),
        pytest.param(framed(oracle.batch_message([(9, b"")])), id="a batch of what was never announced"),
        *(pytest.param(framed(NOISE.randbytes(length)), id=f"noise of {length}") for length in (9, 60, 61, 5000)),
    ],
)
@pytest.mark.parametrize("sender", [0, 1])
@on_ranks([1, 1])
def test_bytes_that_are_no_message_end_the_job(rank: Rank, said: bytes, sender: int, written: Written) -> None:
    if rank.rank == 0:
        rank.group.say(sender, said)
    rank.meet()
    with pytest.raises(InternalError):
        while True:  # the root may be done with the first before the other can tell
            rank.barrier()
    rank.meet()
    assert "the engine stops: internal error" in written()


SILENT, CLOSED = 3, 2
TOLD = {
    SILENT: (
        r"rank 1 \(host1\) is out of reach: no answer for \d+ s, seen from rank 2 \(host2\)",
        r"this rank is out of reach of rank 2 \(host2\): no answer for \d+ s",
    ),
    CLOSED: (
        r"rank 1 \(host1\) is gone: the connection to it was closed, seen from rank 2 \(host2\)",
        r"the connection of rank 2 \(host2\) to this rank was closed",
    ),
}


@pytest.mark.parametrize("reason", [SILENT, CLOSED])
@on_ranks([1, 1, 1])
def test_all_are_told_between_which_two_ranks_a_connection_is_broken(rank: Rank, reason: int) -> None:
    if rank.rank == 0:
        rank.group.say(0, framed(oracle.lost_message(1, -40, reason, 2)))  # to rank 1, which passes it on
    seen, own = TOLD[reason]
    with pytest.raises(PeerLostError, match="^" + (own if rank.rank == 1 else seen)):
        rank.barrier(f"of {rank.rank}")  # which no other rank calls


def test_a_leader_that_reads_nothing_is_out_of_reach() -> None:
    """Nobody is at the other end, which stays open: a process that is stopped."""
    nobody, setup = make_setups([1, 1], tcp=True, peer_timeout_ms=1000)
    try:
        context = Context(setup)
        rank = Rank(context)
        arrays = [np.zeros((1,) * 64)] * (1 << 15)  # 512 bytes each in the announcement: more than a connection buffers
        handle = rank.submit("allreduce", "x", arrays, reduce_op=1)
        with pytest.raises(
            PeerLostError, match=r"rank 0 \(host0\) is out of reach: no answer for 1 s, seen from rank 1 "
        ):
            rank.finish(handle)
        context.destroy()
    finally:
        close_setup(nobody)


@given(count=st.integers(1, 300), data=st.data())
def test_the_core_and_the_bootstrap_have_one_rule(native: ModuleType, count: int, data: st.DataObject) -> None:
    host = data.draw(st.integers(0, count - 1), "host")
    for channel, peers in ((CONTROL, control_peers), (DATA, data_peers)):
        linked = [other for other in range(count) if native.lib.shim_hosts_are_linked(channel, count, host, other)]
        assert linked == peers(host, count)


@pytest.mark.parametrize("sockets", [1, 2])
@pytest.mark.parametrize(
    ("channel", "rank", "host", "told"),
    [
        ("control_fds", 0, 4, "rank 0 on host 0 (host0) was given no connection for agreement to host 4 (host4)"),
        ("control_fds", 7, 6, "rank 7 on host 7 (host7) was given no connection for agreement to host 6 (host6)"),
        ("data_fds", 1, 5, "rank 1 on host 1 (host1) was given no connection for data to host 5 (host5)"),
        ("data_fds", 6, 0, "rank 6 on host 6 (host6) was given no connection for data to host 0 (host0)"),
    ],
)
def test_a_missing_connection_is_named_at_creation(channel: str, rank: int, host: int, told: str, sockets: int) -> None:
    setups = make_setups([1] * 8, sockets_per_peer=sockets)
    fds = list(getattr(setups[rank], channel))
    width = sockets if channel == "data_fds" else 1
    os.close(fds[(host + 1) * width - 1])
    fds[(host + 1) * width - 1] = -1
    setups[rank] = replace(setups[rank], **{channel: fds})
    with pytest.raises(UsageError) as error:
        Context(setups[rank])
    assert told in str(error.value)
    for setup in setups:
        close_setup(setup)


def test_a_leader_without_any_connection_for_agreement_is_refused_by_name() -> None:
    setups = make_setups([1, 1, 1])
    for fd in setups[2].control_fds:
        if fd >= 0:
            os.close(fd)
    setups[2] = replace(setups[2], control_fds=[])
    with pytest.raises(HoroError, match=r"host 2 has no connection for agreement to host 0 \(host0\)"):
        Context(setups[2])
    for setup in setups:
        close_setup(setup)


@on_ranks([1, 1, 1], data_links=False)
def test_without_any_links_for_data_what_moves_none_works(rank: Rank) -> None:
    """An operation that moves data is an error on all ranks, not a hang and not a crash."""
    rank.barrier()
    with pytest.raises(HoroError):
        rank.allreduce(np.ones(10), "x")


PIECE_BYTES = 1 << 17


def test_the_bytes_are_shared_among_the_sockets() -> None:
    values = np.ones(1 << 20, np.float32)
    with Group([1, 1], sockets_per_peer=4, tcp=True, segment_bytes=1 << 20) as group:
        group.run(lambda rank: rank.allreduce(values.copy()))
        infos = [group.data_end(0, n).getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) for n in range(4)]
    received = [int.from_bytes(info[128:136], "little") for info in infos]  # tcpi_bytes_received in linux/tcp.h
    assert sum(received) == values.nbytes  # the ring: half of them twice
    assert max(received) - min(received) <= PIECE_BYTES, received


@pytest.mark.parametrize("number", [0, 2])
@on_ranks([1, 1], [2, 2], sockets_per_peer=3, tcp=True)
def test_a_rank_that_loses_one_socket_is_lost(rank: Rank, hosts: list[int], number: int) -> None:
    with pytest.raises(PeerLostError, match=f"rank (0|{hosts[0]}) "):
        for turn in range(1000):
            if turn == 3 and rank.rank == 0:
                rank.group.data_end(0, number).shutdown(socket.SHUT_RDWR)
            rank.allreduce(np.ones(200_000, np.float32))


def test_no_descriptor_is_left() -> None:
    before = open_descriptors()
    contexts = [Context(setup) for setup in make_setups([1, 1, 1], sockets_per_peer=3)]
    assert len(open_descriptors() - before) > 18
    for context in contexts:
        context.destroy()
    assert open_descriptors() <= before


LENGTH_BYTES = 4
MESSAGES_MAX = 24
"""The message that is damaged is among the first so many of its direction."""
CUT_S = 10.0
"""When the connection ends where a damaged message has left ranks waiting for each other."""


def damage(message: bytes, rng: random.Random) -> bytes:
    """What travels instead of a message, with the length in front."""
    start = rng.randrange(len(message))
    count = rng.randrange(1, 9)
    changed = bytearray(message)
    changed[start] ^= 1 << rng.randrange(8)
    samples = list(oracle.samples().values())
    return rng.choice(
        [
            lambda: framed(bytes(changed)),
            lambda: framed(message[:start] + b"\xff" * count + message[start + count :]),
            lambda: framed(message[:start] + bytes(count) + message[start + count :]),
            lambda: framed(message[:start]),
            lambda: framed(message + rng.randbytes(count)),
            lambda: framed(message) * 2,
            lambda: framed(rng.choice(samples)) + framed(message),
            lambda: framed(rng.choice(samples)),
        ]
    )()


class Between:
    """Passes on what two leaders send each other, one message of one of them damaged."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._sender = rng.randrange(2)
        self._place = rng.randrange(MESSAGES_MAX)
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._cut = threading.Timer(CUT_S, self._shut)
        self.has_damaged = False

    def rewire(self, setups: Sequence[Setup]) -> list[Setup]:
        """The setups of two hosts with this between their leaders."""
        first, second = setups
        near, far = socket.socketpair()
        near.setblocking(False)
        self._ends = [socket.socket(fileno=second.control_fds[0]), far]
        for end in self._ends:
            end.setblocking(True)
        for sender in range(2):
            thread = threading.Thread(target=self._pass, args=(sender,), daemon=True)
            self._threads.append(thread)
            thread.start()
        self._cut.start()
        return [first, replace(second, control_fds=[near.detach(), *second.control_fds[1:]])]

    def close(self) -> None:
        self._cut.cancel()
        self._shut()
        for thread in self._threads:
            thread.join(20)
        for end in self._ends:
            end.close()

    def _shut(self) -> None:
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _pass(self, sender: int) -> None:
        source, sink = self._ends[sender], self._ends[1 - sender]
        count = 0
        with suppress(OSError):
            while length := source.recv(LENGTH_BYTES, socket.MSG_WAITALL):
                message = source.recv(int.from_bytes(length, "little"), socket.MSG_WAITALL)
                hit = sender == self._sender and count == self._place
                sent = length + message
                while hit and sent == length + message:  # zeros in the place of zeros are no damage
                    sent = damage(message, self._rng)
                self.has_damaged |= hit
                sink.sendall(sent)
                count += 1
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def work(rank: Rank, kept: list[np.ndarray]) -> None:
    """Some of everything; ``kept`` holds the memory of operations that are in progress when another one fails."""
    with suppress(HoroError, ValueError):  # ValueError: results that do not fit the test's own arithmetic
        for _ in range(8):
            rank.allreduce(np.ones(10, np.int32), "small")
            rank.allgather(np.ones((rank.rank + 1, 2), np.int8))
            rank.broadcast(np.ones(4, np.int8), 1)
            rank.allreduce(np.ones(6000), "large")
            arrays = [np.ones(3) for _ in range(4)]
            kept += arrays
            handles = [rank.submit("allreduce", f"m{i}", [array], reduce_op=1) for i, array in enumerate(arrays)]
            rank.finish(*handles)
            moved = [np.ones(20_000) for _ in range(2)]
            kept += moved
            rank.finish(rank.receive(moved[0]), rank.send(moved[1], 1 - rank.rank))
            rank.barrier()


@pytest.mark.skipif(native_build.FLAVOUR == "thread", reason="what is looked for is memory, which the other one checks")
@pytest.mark.parametrize("seed", range(16))
def test_a_damaged_message_of_a_member_ends_the_job_or_nothing(seed: int) -> None:
    between = Between(random.Random(seed))
    kept: list[np.ndarray] = []
    try:
        with Group([1, 1], rewire=between.rewire, stall_warning_ms=300, stall_shutdown_ms=1000) as group:
            group.run(lambda rank: work(rank, kept))
    finally:
        between.close()
    assert between.has_damaged
