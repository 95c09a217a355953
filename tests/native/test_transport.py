"""The contract of every transport, and what only one of them promises."""

from __future__ import annotations

import os
import random
import select
import socket
import struct
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from links import (
    CONTROL,
    DATA,
    DEADLINE_MS,
    KINDS,
    TCP_KINDS,
    Fabric,
    Io,
    Rank,
    fabric_of,
    poll_until,
    run_ranks,
    socket_pair,
)

Join = Callable[[int], Fabric]
PEER_LOST = -40
MIB = 1 << 20


@pytest.fixture(params=KINDS)
def join(request: pytest.FixtureRequest, native: ModuleType) -> Iterator[Join]:
    """join(hosts) makes a fabric of the kind under test."""
    yield from _join(native, request.param)


@pytest.fixture(params=TCP_KINDS)
def join_tcp(request: pytest.FixtureRequest, native: ModuleType) -> Iterator[Join]:
    yield from _join(native, request.param)


def _join(native: ModuleType, kind: str) -> Iterator[Join]:
    open_fabrics: list[Any] = []

    def join(hosts: int) -> Fabric:
        manager = fabric_of(native, kind, hosts)
        fabric: Fabric = manager.__enter__()
        open_fabrics.append(manager)
        return fabric

    yield join
    for manager in open_fabrics:
        manager.__exit__(None, None, None)


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def progress_until(ranks: list[Rank], *ios: Io) -> None:
    """Drives several ranks from one thread until all ios are over."""

    def step() -> bool:
        for rank in ranks:
            rank.progress()
        return not any(io.posted for io in ios)

    poll_until(step, "the end of all ios")


# The contract.


def test_messages_of_a_link_arrive_in_order(join: Join) -> None:
    messages = [noise(size, seed) for seed, size in enumerate([1, 0, 7, 70_000, 0, 0, 3])]
    sender, receiver = join(2).ranks
    sends = [sender.send(1, message) for message in messages]
    receives = [receiver.recv(0, len(message)) for message in messages]
    progress_until([sender, receiver], *sends, *receives)
    assert [io.bytes() for io in receives] == messages
    assert all(io.done and io.done_bytes == io.size for io in (*sends, *receives))


def test_receives_may_be_posted_long_after_the_bytes_came(join: Join) -> None:
    sender, receiver = join(2).ranks
    sent = sender.send(1, b"early")
    assert sender.wait(sent) == 0
    late = receiver.recv(0, 5)
    assert receiver.wait(late) == 0
    assert late.bytes() == b"early"


def test_channels_do_not_mix(join: Join) -> None:
    sender, receiver = join(2).ranks
    sends = [sender.send(1, b"data", DATA), sender.send(1, b"ctrl", CONTROL)]
    control = receiver.recv(0, 4, CONTROL)
    progress_until([sender, receiver], *sends, control)
    data = receiver.recv(0, 4, DATA)
    assert receiver.wait(data) == 0
    assert (control.bytes(), data.bytes()) == (b"ctrl", b"data")


def test_an_empty_message_is_done_but_not_before_its_turn(join: Join) -> None:
    sender, receiver = join(2).ranks
    first, empty = receiver.recv(0, 3), receiver.recv(0, 0)
    for _ in range(10):
        receiver.progress()
    assert first.posted and empty.posted
    sends = [sender.send(1, b"abc"), sender.send(1, b"")]
    progress_until([sender, receiver], *sends, first, empty)
    assert first.done and empty.done


def test_a_lone_empty_message_is_done(join: Join) -> None:
    sender, receiver = join(2).ranks
    ios = [sender.send(1, b""), receiver.recv(0, 0)]
    progress_until([sender, receiver], *ios)
    assert all(io.done for io in ios)


def test_large_messages_both_ways_at_once_do_not_deadlock(join: Join) -> None:
    fabric = join(2)
    data = [noise(4 * MIB + 3, seed) for seed in range(2)]

    def body(me: int) -> bytes:
        rank = fabric.ranks[me]
        sent, received = rank.send(1 - me, data[me]), rank.recv(1 - me, len(data[me]))
        assert rank.wait(sent, received) == 0
        return received.bytes()

    assert run_ranks(2, body) == data[::-1]


def test_many_messages_may_be_posted_at_once(join: Join) -> None:
    fabric = join(2)
    messages = [noise(index % 97, index) for index in range(400)]

    def body(me: int) -> list[bytes]:
        rank = fabric.ranks[me]
        receives = [rank.recv(1 - me, len(message)) for message in messages]
        sends = [rank.send(1 - me, message) for message in messages]
        assert rank.wait(*receives, *sends) == 0
        return [io.bytes() for io in receives]

    assert run_ranks(2, body) == [messages, messages]


def test_every_rank_talks_with_every_other(join: Join) -> None:
    hosts = 5
    fabric = join(hosts)

    def body(me: int) -> list[bytes]:
        rank = fabric.ranks[me]
        peers = [peer for peer in range(hosts) if peer != me]
        ios = [rank.send(peer, b"%d to %d" % (me, peer) * 1000) for peer in peers]
        receives = [rank.recv(peer, 6000) for peer in peers]
        assert rank.wait(*ios, *receives) == 0
        return [io.bytes() for io in receives]

    for me, received in enumerate(run_ranks(hosts, body)):
        assert received == [b"%d to %d" % (peer, me) * 1000 for peer in range(hosts) if peer != me]


def test_done_bytes_grow_while_a_message_comes(join: Join) -> None:
    sender, receiver = join(2).ranks
    data = noise(16 * MIB)
    sent, received = sender.send(1, data), receiver.recv(0, len(data))
    seen = [0]

    def step() -> bool:
        sender.progress()
        receiver.progress()
        if received.done_bytes != seen[-1]:
            seen.append(received.done_bytes)
            half = seen[-1] // 2
            assert received.data[half] == data[half : half + 1]
        return received.done

    poll_until(step, "the end of the message")
    assert sent.done
    assert seen == sorted(seen) and seen[-1] == len(data)
    assert len(seen) > 2


def test_progress_says_whether_anything_moved(join: Join) -> None:
    sender, receiver = join(2).ranks
    assert not sender.progress()
    received = receiver.recv(0, 1)
    assert not receiver.progress()
    sent = sender.send(1, b"x")
    assert sender.progress() and sent.done
    poll_until(receiver.progress, "arrival")
    assert received.done
    assert not sender.progress() and not receiver.progress()


def test_posting_to_a_peer_without_a_link_is_refused(join: Join) -> None:
    rank = join(2).ranks[0]
    for peer in (0, -1, 2):
        with pytest.raises(ValueError, match="-60"):
            rank.send(peer, b"x")
        with pytest.raises(ValueError, match="-60"):
            rank.recv(peer, 1)


# Sleeping.


def test_an_idle_link_names_nothing_to_sleep_on(join: Join) -> None:
    fabric = join(3)
    sender, receiver, _ = fabric.ranks
    assert sender.sleep_fds()[0] == 0
    sent, received = sender.send(1, b"x"), receiver.recv(0, 1)
    assert sender.sleep_fds()[0] == 1
    progress_until([sender, receiver], sent, received)
    assert [rank.sleep_fds()[0] for rank in fabric.ranks] == [0, 0, 0]


def test_a_sleeper_sleeps_until_bytes_come(join: Join) -> None:
    sender, receiver = join(2).ranks
    received = receiver.recv(0, 1)
    receiver.progress()
    assert receiver.sleeps(timeout_ms=0)
    sent = sender.send(1, b"x")
    assert sender.wait(sent) == 0
    assert not receiver.sleeps()
    assert receiver.wait(received) == 0


def test_bytes_for_another_link_wake_nobody_for_long(join: Join) -> None:
    fabric = join(3)
    first, second, receiver = fabric.ranks
    received = receiver.recv(0, 1)
    sent = second.send(2, b"x")
    assert second.wait(sent) == 0
    receiver.progress()
    assert receiver.sleeps(timeout_ms=0)
    sent = first.send(2, b"y")
    assert first.wait(sent) == 0
    assert receiver.wait(received) == 0
    assert received.bytes() == b"y"


def test_a_sender_sleeps_until_there_is_room(join: Join) -> None:
    sender, receiver = join(2).ranks
    sent = sender.send(1, bytes(16 * MIB))
    poll_until(lambda: not sender.progress() and sender.sleeps(timeout_ms=0), "a full link")
    received = receiver.recv(0, 16 * MIB)
    poll_until(lambda: receiver.progress() and not sender.sleeps(timeout_ms=0), "room")
    progress_until([sender, receiver], sent, received)
    assert sent.done and received.done


# Loss.


def lose(fabric: Fabric, how: str, host: int, by: int) -> None:
    if how == "crash":
        fabric.crash(host)
    else:
        fabric.cut(by, host)


def await_news(fabric: Fabric, host: int) -> None:
    """Until the end of a connection, which the kernel may deliver a moment later, has come."""
    fds = fabric.data_fds(host)
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    if fds and not poller.poll(DEADLINE_MS):
        raise TimeoutError("the end of the connection has not come")


both_losses = pytest.mark.parametrize("how", ["crash", "cut"])


@both_losses
@pytest.mark.parametrize("action", ["send", "recv"])
def test_a_loss_while_idle_is_seen_by_the_next_message(join: Join, how: str, action: str) -> None:
    fabric = join(2)
    rank = fabric.ranks[0]
    lose(fabric, how, 1, by=0)
    await_news(fabric, 0)
    assert rank.lost()[0] == -1
    io = rank.send(1, b"x") if action == "send" else rank.recv(1, 1)
    assert rank.wait(io) == PEER_LOST
    assert io.failed
    peer, why = rank.lost()
    assert peer == 1 and why != ""


@both_losses
def test_a_loss_wakes_and_fails_a_waiting_receive(join: Join, how: str) -> None:
    fabric = join(2)
    rank = fabric.ranks[0]
    received = rank.recv(1, 8)

    def body(me: int) -> int:
        if me == 0:
            return rank.wait(received)
        lose(fabric, how, 1, by=0)
        return 0

    assert run_ranks(2, body) == [PEER_LOST, 0]
    assert received.failed


@both_losses
def test_a_loss_in_the_middle_of_a_message_fails_both_directions(join: Join, how: str) -> None:
    fabric = join(2)
    rank, other = fabric.ranks
    sent, received = rank.send(1, bytes(16 * MIB)), rank.recv(1, 16 * MIB)
    partly, _ = other.recv(0, 16 * MIB), other.send(0, bytes(16 * MIB))

    def step() -> bool:
        rank.progress()
        other.progress()
        return partly.done_bytes > 0 and received.done_bytes > 0

    poll_until(step, "some bytes")
    lose(fabric, how, 1, by=0)
    assert rank.wait(sent, received) == PEER_LOST
    assert sent.failed and received.failed
    assert 0 < received.done_bytes < received.size


@both_losses
def test_after_a_loss_every_io_with_that_peer_fails_on_all_channels(join: Join, how: str) -> None:
    fabric = join(2)
    rank = fabric.ranks[0]
    posted = [rank.recv(1, 4, CONTROL), rank.recv(1, 4, DATA), rank.send(1, bytes(16 * MIB), DATA)]
    lose(fabric, how, 1, by=0)
    assert rank.wait(*posted) == PEER_LOST
    later = [rank.send(1, b"x", CONTROL), rank.recv(1, 1, DATA), rank.send(1, b"", DATA)]
    assert not rank.sleeps(timeout_ms=0)
    assert rank.progress()
    assert all(io.failed for io in (*posted, *later))
    assert rank.sleep_fds()[0] == 0


@both_losses
def test_the_others_go_on_after_a_loss(join: Join, how: str) -> None:
    fabric = join(3)
    rank, other, _ = fabric.ranks
    lost_io = rank.recv(2, 1)
    received, sent = rank.recv(1, MIB), other.send(0, noise(MIB))
    lose(fabric, how, 2, by=0)
    assert rank.wait(lost_io) == PEER_LOST
    progress_until([rank, other], received, sent)
    assert received.bytes() == noise(MIB)
    again, answer = rank.send(1, b"still here"), other.recv(0, 10)
    progress_until([rank, other], again, answer)
    assert answer.bytes() == b"still here"
    assert rank.lost()[0] == 2


def test_the_first_lost_peer_stays_the_one_reported(join: Join) -> None:
    fabric = join(3)
    rank = fabric.ranks[0]
    for peer in (2, 1):
        io = rank.recv(peer, 1)
        fabric.crash(peer)
        assert rank.wait(io) == PEER_LOST
    assert rank.lost()[0] == 2


@pytest.mark.parametrize("channel", [CONTROL, DATA])
def test_last_words_of_a_peer_are_delivered(join: Join, channel: int) -> None:
    fabric = join(2)
    rank, other = fabric.ranks
    sent = other.send(0, b"good" + b"bye", channel)
    assert other.wait(sent) == 0
    fabric.crash(1)
    first, second, third = rank.recv(1, 4, channel), rank.recv(1, 3, channel), rank.recv(1, 1, channel)
    assert rank.wait(first, second, third) == PEER_LOST
    assert (first.bytes(), second.bytes()) == (b"good", b"bye")
    assert first.done and second.done and third.failed


def test_destroy_fails_what_is_posted(join: Join) -> None:
    rank = join(2).ranks[0]
    posted = [rank.recv(1, 5), rank.recv(1, 0), rank.send(1, b"x", CONTROL)]
    rank.destroy()
    assert all(io.failed for io in posted)


def test_an_abandoned_channel_lets_go_of_its_memory_and_refuses_more(join: Join) -> None:
    rank, other = join(2).ranks
    posted = [rank.recv(1, 16 * MIB), rank.send(1, bytes(16 * MIB)), rank.recv(1, 0)]
    sent = other.send(0, bytes(16 * MIB))
    poll_until(lambda: bool(other.progress() | rank.progress()) and posted[0].done_bytes > 0, "some bytes")
    rank.lib.shim_abandon(rank.transport, DATA)
    assert all(io.failed for io in posted)
    assert rank.sleep_fds()[0] == 0
    for post in (lambda: rank.send(1, b"x"), lambda: rank.recv(1, 1)):
        with pytest.raises(ValueError, match="-43"):
            post()
    # The peer sees no end, and the other channel goes on.
    assert sent.posted and rank.lost()[0] == other.lost()[0] == -1
    told, heard = rank.send(1, b"cause", CONTROL), other.recv(0, 5, CONTROL)
    progress_until([rank, other], told, heard)
    assert heard.bytes() == b"cause"


# Stream sockets.


def test_small_messages_share_a_system_call(join_tcp: Join) -> None:
    sender, receiver = join_tcp(2).ranks
    sends = [sender.send(1, b"message") for _ in range(16)]
    receives = [receiver.recv(0, 7) for _ in range(16)]
    assert sender.progress()
    assert all(io.done for io in sends)
    poll_until(receiver.progress, "arrival")
    assert all(io.done for io in receives)


def test_sleep_names_each_busy_link_with_its_directions(join_tcp: Join) -> None:
    rank = join_tcp(4).ranks[0]
    rank.recv(1, 1, DATA)
    rank.send(2, b"x", DATA)
    rank.recv(3, 1, CONTROL)
    rank.send(3, b"x", CONTROL)
    count, named = rank.sleep_fds()
    assert count == 3
    assert sorted(events for _, events in named) == [1, 4, 5]  # POLLIN, POLLOUT, both
    assert rank.sleep_fds(capacity=2) == (3, named[:2])
    assert rank.sleep_fds(capacity=0) == (3, [])


def test_hundreds_of_links_are_all_served(native: ModuleType) -> None:
    hosts = 140
    pairs = [socket.socketpair() for _ in range(hosts - 1)]
    rank = create_tcp(native, [-1, *(near.detach() for near, _ in pairs)])
    receives = [rank.recv(peer, 2) for peer in range(1, hosts)]
    for peer, (_, far) in enumerate(pairs, start=1):
        far.send(b"%c!" % peer)
    assert rank.wait(*receives) == 0
    assert [io.bytes() for io in receives] == [b"%c!" % peer for peer in range(1, hosts)]
    rank.destroy()
    for _, far in pairs:
        far.close()


def create_tcp(native: ModuleType, data_fds: list[int], peer_timeout_ms: int = 30_000) -> Rank:
    """A transport with data links only. ValueError with the status and the sentence if it is refused."""
    status = native.ffi.new("int *")
    error = native.ffi.new("char[]", 1024)
    fds = native.ffi.new("int[]", data_fds)
    transport = native.lib.shim_tcp_create(native.ffi.NULL, fds, len(data_fds), peer_timeout_ms, status, error)
    if transport == native.ffi.NULL:
        raise ValueError(f"{status[0]}: {native.ffi.string(error).decode()}")
    return Rank(native, transport)


def test_options_of_a_tcp_link(native: ModuleType) -> None:
    near, far = socket_pair("tcp")
    with near, far:
        rank = create_tcp(native, [-1, near.fileno()], peer_timeout_ms=30_000)

        def option(name: int) -> int:
            return near.getsockopt(socket.IPPROTO_TCP, name)

        def keepalive() -> int:
            return near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

        assert not os.get_blocking(near.fileno())
        assert option(socket.TCP_NODELAY) != 0
        assert option(socket.TCP_USER_TIMEOUT) == 30_000
        probes, interval_s = option(socket.TCP_KEEPCNT), option(socket.TCP_KEEPINTVL)
        assert option(socket.TCP_KEEPIDLE) + probes * interval_s == 30
        assert keepalive() == 0
        for enabled in (1, 1, 0, 1):
            native.lib.shim_watch(rank.transport, enabled)
            assert keepalive() == enabled
        rank.destroy()
        near.detach()  # destroy has closed it


def test_keepalive_is_never_asked_for_zero_seconds(native: ModuleType) -> None:
    near, far = socket_pair("tcp")
    with near, far:
        rank = create_tcp(native, [-1, near.fileno()], peer_timeout_ms=1)
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 1
        rank.destroy()
        near.detach()


def test_a_reset_connection_says_so(native: ModuleType) -> None:
    near, far = socket_pair("tcp")
    rank = create_tcp(native, [-1, near.detach()])
    received = rank.recv(1, 1)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    assert rank.wait(received) == PEER_LOST
    assert rank.lost() == (1, "Connection reset by peer")
    rank.destroy()


def test_a_closed_connection_says_so(join_tcp: Join) -> None:
    fabric = join_tcp(2)
    fabric.crash(1)
    rank = fabric.ranks[0]
    assert rank.wait(rank.recv(1, 1)) == PEER_LOST
    assert rank.lost() == (1, "connection closed")


def test_a_peer_that_stops_reading_is_lost_after_the_timeout(native: ModuleType) -> None:
    near, far = socket_pair("tcp")
    with far:
        rank = create_tcp(native, [-1, near.detach()], peer_timeout_ms=200)
        sent = rank.send(1, bytes(64 * MIB))
        assert rank.wait(sent) == PEER_LOST
        assert rank.lost() == (1, "Connection timed out")
        rank.destroy()


def bad_pipe() -> tuple[int, list[Any]]:
    read_end, write_end = os.pipe()
    return read_end, [os.fdopen(read_end, "rb"), os.fdopen(write_end, "wb")]


def bad_datagram() -> tuple[int, list[Any]]:
    pair = socket.socketpair(type=socket.SOCK_DGRAM)
    return pair[0].fileno(), list(pair)


def bad_unconnected() -> tuple[int, list[Any]]:
    lonely = socket.socket()
    return lonely.fileno(), [lonely]


def bad_closed() -> tuple[int, list[Any]]:
    return 1_000_000, []


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (bad_pipe, "for host 2 is no socket"),
        (bad_closed, "descriptor 1000000 for host 2 is no socket: Bad file descriptor"),
        (bad_datagram, "for host 2 is no stream socket"),
        (bad_unconnected, "for host 2 is not connected"),
    ],
)
def test_a_bad_descriptor_is_named_and_all_stay_with_the_caller(
    native: ModuleType, make: Callable[[], tuple[int, list[Any]]], sentence: str
) -> None:
    bad, kept = make()
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
    with pytest.raises(ValueError, match=f"not {hosts} and {timeout_ms}"):
        create_tcp(native, [-1] * hosts, timeout_ms)


# Loopback.


class Hub:
    """A hub whose endpoints are made one by one."""

    def __init__(self, native: ModuleType, hosts: int, delay_polls: int = 0, piece_bytes: int = 0) -> None:
        self.native = native
        self.hub = native.lib.shim_hub_create(hosts, delay_polls, piece_bytes)
        self.ranks: list[Rank] = []

    def rank(self, host: int, lane: int = 0) -> Rank:
        status = self.native.ffi.new("int *")
        error = self.native.ffi.new("char[]", 1024)
        transport = self.native.lib.shim_loopback_create(self.hub, host, lane, status, error)
        if transport == self.native.ffi.NULL:
            raise ValueError(self.native.ffi.string(error).decode())
        self.ranks.append(Rank(self.native, transport))
        return self.ranks[-1]

    def close(self) -> None:
        for rank in self.ranks:
            rank.destroy()
        self.native.lib.shim_hub_destroy(self.hub)


@pytest.fixture
def hub_of(native: ModuleType) -> Iterator[Callable[..., Hub]]:
    hubs: list[Hub] = []

    def make(*arguments: int) -> Hub:
        hubs.append(Hub(native, *arguments))
        return hubs[-1]

    yield make
    for hub in hubs:
        hub.close()


def test_a_delayed_link_delivers_after_so_many_polls_in_pieces(hub_of: Callable[..., Hub]) -> None:
    hub = hub_of(2, 3, 4)
    sender, receiver = hub.rank(0), hub.rank(1)
    received = receiver.recv(0, 10)
    sender.send(1, b"0123456789")
    while sender.progress():
        pass
    arrived = []
    for _ in range(6):
        receiver.progress()
        arrived.append(received.done_bytes)
    assert arrived == [0, 0, 4, 8, 10, 10]
    assert received.bytes() == b"0123456789"


def test_bytes_may_be_sent_before_the_other_end_exists(hub_of: Callable[..., Hub]) -> None:
    hub = hub_of(2)
    sender = hub.rank(0)
    assert sender.wait(sender.send(1, b"hello")) == 0
    receiver = hub.rank(1)
    received = receiver.recv(0, 5)
    assert receiver.wait(received) == 0
    assert received.bytes() == b"hello"


def test_lanes_are_apart_and_control_is_for_lane_zero(hub_of: Callable[..., Hub]) -> None:
    hub = hub_of(2)
    ranks = {(host, lane): hub.rank(host, lane) for host in range(2) for lane in range(2)}
    for lane in range(2):
        ranks[0, lane].send(1, b"%d" % lane)
        ranks[0, lane].progress()
    received = [ranks[1, lane].recv(0, 1) for lane in range(2)]
    for lane in range(2):
        assert ranks[1, lane].wait(received[lane]) == 0
    assert [io.bytes() for io in received] == [b"0", b"1"]
    with pytest.raises(ValueError, match="-60"):
        ranks[0, 1].send(1, b"x", CONTROL)


def test_an_endpoint_exists_once(hub_of: Callable[..., Hub]) -> None:
    hub = hub_of(2)
    hub.rank(0)
    with pytest.raises(ValueError, match="host 0 has had a loopback endpoint on lane 0 already"):
        hub.rank(0)
    with pytest.raises(ValueError, match="host 2 is not one of the 2 hosts"):
        hub.rank(2)
