"""What only stream sockets promise: few system calls, options, reasons, and descriptors that stay the caller's."""

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from links import CLOSED, CONTROL, DATA, NONE, SILENT, TCP_KINDS, Join, Rank, create_tcp, joining, socket_pair

PEER_LOST = -40
MIB = 1 << 20


@pytest.fixture(params=TCP_KINDS)
def join(request: pytest.FixtureRequest, native: ModuleType) -> Iterator[Join]:
    """join(hosts) makes a fabric of stream sockets."""
    yield from joining(native, request.param)


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


@pytest.mark.parametrize(("hosts", "timeout_ms"), [(0, 1000), (2, 0), (2, -5)])
def test_impossible_arguments_are_refused(native: ModuleType, hosts: int, timeout_ms: int) -> None:
    with pytest.raises(ValueError, match=f"not {hosts}, {timeout_ms} and 1"):
        create_tcp(native, [-1] * hosts, timeout_ms)


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


def test_sends_take_the_sockets_in_turn_and_empty_ones_take_none(striped: tuple[Rank, list[socket.socket]]) -> None:
    rank, far = striped
    sends = [rank.send(1, data) for data in (b"", b"a", b"bb", b"", b"", b"c", b"d", b"e")]
    assert rank.wait(*sends) == 0
    assert [end.recv(9) for end in far] == [b"ad", b"bbe", b"c"]


def test_receives_take_the_sockets_in_turn_of_their_own(striped: tuple[Rank, list[socket.socket]]) -> None:
    rank, far = striped
    assert rank.wait(rank.send(1, b"moves the turn of sends only")) == 0
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


def test_a_host_has_all_of_its_sockets_or_none(native: ModuleType) -> None:
    near, far = socket.socketpair()
    with near, far:
        for fds in ([near.fileno(), -1], [-1, near.fileno()]):
            with pytest.raises(ValueError, match="-1: of 2 sockets for host 1 only some are given"):
                create_tcp(native, [-1, -1, *fds], sockets=2)
