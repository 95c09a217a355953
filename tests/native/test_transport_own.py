"""What one kind of transport promises alone: stream sockets, and MPI, which may fail, keep what it got, or be gone."""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from fabric import close_setup, make_setups
from links import CLOSED, CONTROL, DATA, NONE, SILENT, TCP_KINDS, Rank, create_tcp, poll_until, socket_pair

from horo.core.context import Context
from horo.core.setup import MPI_FUNCTIONS, MpiCalls, MpiUse
from horo.errors import UsageError

PEER_LOST = -40
MIB = 1 << 20


@pytest.mark.parametrize("kind", TCP_KINDS)
def test_last_words_on_one_socket_outlive_the_end_of_the_other(native: ModuleType, kind: str) -> None:
    (control, far_control), (data, far_data) = socket_pair(kind), socket_pair(kind)
    with far_control, far_data:
        rank = create_tcp(native, [-1, data.detach()], control_fds=[-1, control.detach()])
        received = rank.recv(1, 1, DATA)
        far_data.close()
        assert rank.wait(received) == PEER_LOST
        far_control.sendall(b"rank 7 has died")
        words = rank.recv(1, 15, CONTROL)
        assert rank.wait(words) == 0
        assert words.bytes() == b"rank 7 has died"
        far_control.close()
        assert rank.wait(rank.recv(1, 1, CONTROL)) == PEER_LOST
        assert rank.loss(1) == CLOSED
        rank.destroy()


@pytest.mark.parametrize("sockets", [1, 2])
def test_options_of_a_tcp_link(native: ModuleType, sockets: int) -> None:
    """Only control links give up on a peer that does not acknowledge."""
    (near, far), (first, far_first), (control, far_control) = (socket_pair("tcp") for _ in range(3))
    with near, far, far_first, control, far_control:
        fds = [near.fileno()] if sockets == 1 else [first.detach(), near.fileno()]
        rank = create_tcp(native, [-1] * sockets + fds, 30_000, [-1, control.fileno()], sockets=sockets)
        assert not os.get_blocking(near.fileno())
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        assert control.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        is_probed = [near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)]
        for enabled in (1, 1, 0, 1):
            native.lib.shim_watch(rank.transport, enabled)
            is_probed.append(near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
        assert is_probed == [0, 1, 1, 0, 1]
        rank.destroy()
        near.detach()  # destroy has closed both
        control.detach()


@pytest.mark.parametrize("timeout_s", [0.001, 30, 65_535, 65_536, 1_000_000, 2_147_483])
def test_keepalive_takes_any_timeout(native: ModuleType, timeout_s: float) -> None:
    """Never zero seconds, and at most 32767 s, which is what Linux takes; HORO_PEER_TIMEOUT may be up to 1000000 s."""
    near, far = socket_pair("tcp")
    with near, far:
        rank = create_tcp(native, [-1, near.fileno()], peer_timeout_ms=round(timeout_s * 1000))
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle_s, interval_s, probes = (near.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        assert idle_s == min(max(int(timeout_s) // 2, 1), 32_767)
        assert interval_s == min(max(int(timeout_s) // 2 // 5, 1), 32_767)
        assert timeout_s < 1 or 0 <= idle_s + interval_s * probes - timeout_s <= interval_s
        rank.destroy()
        near.detach()


def test_a_peer_that_reads_no_control_is_lost_as_silent_after_the_timeout(native: ModuleType) -> None:
    near, far = socket_pair("tcp")
    with far:
        rank = create_tcp(native, [-1, -1], peer_timeout_ms=200, control_fds=[-1, near.detach()])
        sent = rank.send(1, bytes(64 * MIB), CONTROL)
        assert rank.wait(sent) == PEER_LOST
        assert rank.loss(1) == SILENT
        rank.destroy()


def test_a_peer_that_reads_no_data_for_longer_than_the_timeout_is_waited_for(native: ModuleType) -> None:
    near, far = socket_pair("tcp")
    with far:
        rank = create_tcp(native, [-1, near.detach()], peer_timeout_ms=200)
        sent = rank.send(1, bytes(64 * MIB))
        assert rank.wait(sent, timeout_ms=1000) != 0
        assert rank.loss(1) == NONE
        left = 64 * MIB
        while left > 0:
            rank.progress()
            with contextlib.suppress(BlockingIOError):
                left -= len(far.recv(MIB, socket.MSG_DONTWAIT))
        assert rank.wait(sent) == 0
        rank.destroy()


def ends_of_a_pipe() -> list[Any]:
    return [os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True)]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (ends_of_a_pipe, "for host 2 is no socket"),
        (list, "descriptor 1000000 for host 2 is no socket: Bad file descriptor"),
        (lambda: [*socket.socketpair(type=socket.SOCK_DGRAM)], "for host 2 is no stream socket"),
        (lambda: [socket.socket()], "for host 2 is not connected"),
    ],
)
def test_a_bad_descriptor_is_named_none_taken(native: ModuleType, make: Callable[[], list[Any]], sentence: str) -> None:
    kept = make()
    bad = kept[0].fileno() if kept else 1_000_000
    near, far = socket.socketpair()
    with near, far:
        with pytest.raises(ValueError, match=sentence) as caught:
            create_tcp(native, [-1, near.fileno(), bad])
        assert str(caught.value).startswith("-1:")
        near.send(b"x")
        assert far.recv(1) == b"x"
    for thing in kept:
        thing.close()


@pytest.fixture
def striped(native: ModuleType) -> Iterator[tuple[Rank, list[socket.socket]]]:
    """A rank with three sockets to its only peer, and the other ends."""
    pairs = [socket_pair("tcp") for _ in range(3)]
    rank = create_tcp(native, [-1] * 3 + [near.detach() for near, _ in pairs], sockets=3)
    far = [end for _, end in pairs]
    for end in far:
        end.settimeout(10)
    yield rank, far
    rank.destroy()
    for end in far:
        end.close()


def test_sends_and_receives_take_the_sockets_each_in_turn(striped: tuple[Rank, list[socket.socket]]) -> None:
    rank, far = striped
    sends = [rank.send(1, data) for data in (b"", b"a", b"bb", b"", b"", b"c", b"d", b"e")]
    assert rank.wait(*sends) == 0
    assert [end.recv(9) for end in far] == [b"ad", b"bbe", b"c"]
    receives = [rank.recv(1, size) for size in (1, 2, 0, 3, 4)]
    for end, data in zip(far, (b"a" + b"dddd", b"bb", b"ccc"), strict=True):
        end.sendall(data)
    assert rank.wait(*receives) == 0
    assert [io.bytes() for io in receives] == [b"a", b"bb", b"", b"ccc", b"dddd"]


@pytest.mark.parametrize("broken", range(3))
@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_lost_socket_is_a_lost_peer(striped: tuple[Rank, list[socket.socket]], broken: int, how: str) -> None:
    rank, far = striped
    receives = [rank.recv(1, 1) for _ in range(6)]
    for end in far:
        end.sendall(b"x")
    assert rank.wait(*receives[:3]) == 0
    if how == "reset":
        far[broken].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far[broken].close()
    assert rank.wait(*receives) == PEER_LOST
    assert all(io.done for io in receives[:3]) and all(io.failed for io in receives[3:])
    assert rank.loss(1) == CLOSED
    later = [rank.send(1, b"x") for _ in range(3)] + [rank.recv(1, 1) for _ in range(3)]
    assert rank.wait(*later) == PEER_LOST
    assert all(io.failed for io in later)
    for end in far:
        if end.fileno() >= 0:
            assert end.recv(1) == b"", "the peer learns of the end on the other sockets"


def test_impossible_arguments_are_refused(native: ModuleType) -> None:
    """A host has all of its sockets or none."""
    for hosts, timeout_ms in ((0, 1000), (2, 0), (2, -5)):
        with pytest.raises(ValueError, match=f"not {hosts}, {timeout_ms} and 1"):
            create_tcp(native, [-1] * hosts, timeout_ms)
    near, far = socket.socketpair()
    with near, far:
        for fds in ([near.fileno(), -1], [-1, near.fileno()]):
            with pytest.raises(ValueError, match="-1: of 2 sockets for host 1 only some are given"):
                create_tcp(native, [-1, -1, *fds], sockets=2)


class FakeMpi:
    """An MPI that does what a test tells it, and transports of two hosts over it."""

    def __init__(self, native: ModuleType) -> None:
        self.native = native
        self.state: Any = native.lib.shim_fake_reset()
        self.ranks: list[Rank] = []

    def rank(self, peer_timeout_ms: int = 30_000) -> Rank:
        ffi = self.native.ffi
        calls = ffi.new("horo_mpi *")
        self.native.lib.shim_fake_describe(calls, 2)
        peers = calls.rank_of_host = ffi.new("int32_t[]", [-1, 1])
        status, error = ffi.new("int *"), ffi.new("char[]", 1024)
        fds = ffi.new("int[]", [-1, -1])
        transport = self.native.lib.shim_mpi_create(fds, calls, len(peers), peer_timeout_ms, status, error)
        assert transport != ffi.NULL
        self.ranks.append(Rank(self.native, transport))
        return self.ranks[-1]


@pytest.fixture
def mpi(native: ModuleType) -> Iterator[FakeMpi]:
    fake = FakeMpi(native)
    yield fake
    fake.state.obeys_cancel = fake.state.completes = 1
    for rank in fake.ranks:
        rank.destroy()


def test_an_error_of_mpi_while_testing_or_posting_loses_the_peer(mpi: FakeMpi) -> None:
    rank = mpi.rank()
    sent, received = rank.send(1, b"x"), rank.recv(1, 1)
    mpi.state.test_error = 7
    assert rank.wait(sent, received) == PEER_LOST
    assert sent.failed and received.failed
    assert rank.loss(1) == CLOSED
    mpi.state.test_error = 0
    later = rank.recv(1, 1)
    assert rank.wait(later) == PEER_LOST
    assert rank.idle
    rank = mpi.rank()
    mpi.state.post_error = 9
    sent = rank.send(1, b"x")
    assert sent.failed
    assert rank.loss(1) == CLOSED


def test_mpi_gets_a_few_messages_at_once(mpi: FakeMpi) -> None:
    rank = mpi.rank()
    ios = [rank.send(1, bytes(1024)) for _ in range(10)]
    assert mpi.state.posted == 8
    mpi.state.completes = 1
    assert rank.wait(*ios) == 0
    assert mpi.state.posted == 10


def test_mpi_gets_large_messages_in_parts(mpi: FakeMpi) -> None:
    rank = mpi.rank()
    ios = [rank.send(1, bytes(3 * 1024 + 1)) for _ in range(5)]
    mpi.state.completes = 1
    seen = [0]
    while not ios[0].done:
        assert rank.progress()
        seen.append(ios[0].done_bytes)
    assert seen == [0, 1024, 2048, 3072, 3073]
    assert rank.wait(*ios) == 0
    assert mpi.state.posted == 20
    assert all(io.done_bytes == io.size for io in ios)


def test_abandoned_receives_are_cancelled_and_given_back(mpi: FakeMpi) -> None:
    rank = mpi.rank()
    posted = [rank.recv(1, 10) for _ in range(3)]
    mpi.state.obeys_cancel = 1
    rank.lib.shim_abandon(rank.transport, 1)
    assert all(io.failed for io in posted)
    assert (mpi.state.cancelled, mpi.state.freed) == (3, 0)
    rank = mpi.rank()  # what MPI does not give back is let go after a while
    posted = [rank.send(1, b"never received"), rank.recv(1, 5)]
    rank.lib.shim_abandon(rank.transport, 1)
    assert all(io.failed for io in posted)
    assert (mpi.state.cancelled, mpi.state.freed) == (4, 1)  # a send is not cancelled


def test_a_peer_that_begins_to_receive_nothing_is_lost_after_the_timeout(mpi: FakeMpi) -> None:
    rank = mpi.rank(peer_timeout_ms=50)
    received = rank.recv(1, 1)
    sent = rank.send(1, b"x")
    poll_until(lambda: rank.progress() or not sent.posted, "the timeout")
    assert sent.failed and received.failed
    assert rank.loss(1) == SILENT
    rank = mpi.rank(peer_timeout_ms=1)  # waiting to receive is no reason
    received = rank.recv(1, 1)
    assert rank.wait(received, timeout_ms=100) != 0
    assert received.posted
    assert rank.loss(1) == NONE


def test_the_time_in_which_this_process_was_stopped_is_no_silence_of_a_peer(mpi: FakeMpi) -> None:
    rank = mpi.rank(peer_timeout_ms=1000)
    sent = rank.send(1, b"x")
    rank.progress()
    begin_s = time.monotonic()
    poll_until(lambda: time.monotonic() - begin_s > 1.5, "longer than the timeout without a look")
    rank.progress()
    assert sent.posted
    assert rank.loss(1) == NONE


@pytest.mark.parametrize("how", ["finalized", "forked"])
def test_an_mpi_that_must_not_be_called_is_not_called_at_the_end(mpi: FakeMpi, how: str) -> None:
    rank = mpi.rank()
    io = rank.recv(1, 5)
    before = mpi.state.calls
    if how == "forked":
        child = os.fork()
        if child == 0:
            rank.destroy()
            os._exit(mpi.state.calls - before)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert io.posted
    else:
        mpi.state.is_finalized = 1
        rank.destroy()
        assert mpi.state.calls == before
        assert io.failed


CALLS = MpiCalls(handle_bytes=8, status_bytes=24, size=2, communicator=1, byte=1, functions=[1] * len(MPI_FUNCTIONS))


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (MpiUse(replace(CALLS, handle_bytes=5)), "handles of 5 bytes; horo knows those of 4 and 8 bytes"),
        (MpiUse(replace(CALLS, status_bytes=0)), "an MPI_Status of 0 bytes; horo has room for 1 to 128"),
        (MpiUse(replace(CALLS, status_bytes=500)), "an MPI_Status of 500 bytes"),
        (MpiUse(CALLS, message_bytes=(1 << 30) + 1), "1 to 1073741824 bytes, not 1073741825"),
        (MpiUse(CALLS, message_bytes=0), "1 to 1073741824 bytes, not 0"),
        (MpiUse(replace(CALLS, functions=[1, 1, 0, *[1] * 3])), "the address of MPI_Test is missing"),
        (MpiUse(CALLS), "no ranks of other hosts are given"),
        (MpiUse(CALLS, rank_of_host=[-1, 2]), "for host 1 is to go to rank 2 of an MPI communicator of 2"),
        (MpiUse(CALLS, rank_of_host=[-1, -1]), "no rank of host 1 is given"),
    ],
)
def test_a_setup_that_names_no_usable_mpi_is_refused(use: MpiUse, sentence: str) -> None:
    setups = make_setups([1, 1])
    try:
        with pytest.raises(UsageError, match=sentence):
            Context(replace(setups[0], mpi=use))
    finally:
        for setup in setups:
            close_setup(setup)


def test_functions_have_the_order_of_the_core(native: ModuleType) -> None:
    assert [getattr(native.lib, "HORO_" + name.upper()) for name in MPI_FUNCTIONS] == list(range(len(MPI_FUNCTIONS)))
    assert len(MPI_FUNCTIONS) == native.lib.HORO_MPI_FUNCTION_COUNT
