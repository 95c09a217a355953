"""What only the loopback promises: faults on request, lanes, and links that exist before their ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from links import CONTROL, DATA, Rank


class Hub:
    """A hub whose endpoints are made one by one."""

    def __init__(
        self,
        native: ModuleType,
        hosts: int,
        *,
        delay_polls: tuple[int, int] = (0, 0),
        piece_bytes: int = 0,
        one_piece: bool = False,
    ) -> None:
        self.native = native
        self.hub = native.lib.shim_hub_create(hosts, *delay_polls, piece_bytes, one_piece)
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

    def make(hosts: int, **options: Any) -> Hub:
        hubs.append(Hub(native, hosts, **options))
        return hubs[-1]

    yield make
    for hub in hubs:
        hub.close()


def test_a_delayed_link_delivers_after_so_many_polls_in_pieces(hub_of: Callable[..., Hub]) -> None:
    hub = hub_of(2, delay_polls=(0, 3), piece_bytes=4)
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


@pytest.mark.parametrize("late", [CONTROL, DATA])
def test_one_channel_may_be_late(hub_of: Callable[..., Hub], late: int) -> None:
    hub = hub_of(2, delay_polls=(5, 0) if late == CONTROL else (0, 5))
    sender, receiver = hub.rank(0), hub.rank(1)
    received = [receiver.recv(0, 1, channel) for channel in (CONTROL, DATA)]
    for channel in (CONTROL, DATA):
        sender.send(1, b"x", channel)
    sender.progress()
    calls = [0, 0]
    while not all(io.done for io in received):
        for channel, io in enumerate(received):
            calls[channel] += not io.done
        receiver.progress()
    assert calls[late] == 5
    assert calls[1 - late] == 1


def test_one_piece_moves_per_call_over_all_links_which_take_turns(hub_of: Callable[..., Hub]) -> None:
    pieces, piece_bytes = 50, 4
    hub = hub_of(3, piece_bytes=piece_bytes, one_piece=True)
    rank, *others = (hub.rank(host) for host in range(3))
    ios = []
    for peer, other in enumerate(others, start=1):
        for channel in (CONTROL, DATA):
            other.send(0, bytes(pieces * piece_bytes), channel)
            ios += [
                rank.recv(peer, pieces * piece_bytes, channel),
                rank.send(peer, bytes(pieces * piece_bytes), channel),
            ]
        other.send_off()
    for call in range(1, pieces * len(ios) + 1):
        assert rank.progress()
        assert sum(io.done_bytes for io in ios) == call * piece_bytes
        if call == pieces:
            assert all(io.done_bytes > 0 for io in ios)
    assert all(io.done for io in ios)


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
