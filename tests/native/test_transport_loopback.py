"""What only the loopback promises: faults on request, lanes, and links that exist before their ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from links import CONTROL, Rank


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
