"""Choosing addresses: the ones that lead to the peers, or the ones the user names."""

from __future__ import annotations

import socket

import psutil
import pytest

from horo.bootstrap.net import interfaces
from horo.bootstrap.net.addresses import bind_all
from horo.bootstrap.net.interfaces import (
    interface_addresses,
    is_loopback,
    listen_addresses,
    route_source,
    select_addresses,
)
from horo.errors import ResourceError, UsageError

AVAILABLE = {"lo": ["127.0.0.1", "::1"], "eth0": ["192.168.7.3"], "ib0": ["10.1.4.3", "fd00:7::3"], "down0": []}


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"10.1.4.9": "10.1.4.3", "192.168.7.9": "192.168.7.3"}
    monkeypatch.setattr(interfaces, "route_source", table.get)


@pytest.mark.usefixtures("routes")
def test_peers_on_one_machine_connect_on_loopback() -> None:
    assert listen_addresses("127.0.0.1", [], same_machine=True, wanted=None) == ["127.0.0.1"]
    assert listen_addresses("192.168.7.3", [], same_machine=True, wanted=None) == ["127.0.0.1"]
    assert listen_addresses(None, [], same_machine=True, wanted=None) == ["127.0.0.1"]


@pytest.mark.usefixtures("routes")
def test_peers_elsewhere_are_met_where_routes_lead_to_them() -> None:
    beside_store = listen_addresses("127.0.0.1", ["10.1.4.9", "10.1.4.9"], same_machine=False, wanted=None)
    assert beside_store == ["10.1.4.3"]
    away_from_store = listen_addresses("192.168.7.3", ["127.0.0.1"], same_machine=False, wanted=None)
    assert away_from_store == ["192.168.7.3"]
    both = listen_addresses("192.168.7.3", ["10.1.4.9", "192.168.7.9", None], same_machine=True, wanted=None)
    assert both == ["192.168.7.3", "10.1.4.3", "127.0.0.1"]


@pytest.mark.usefixtures("routes")
def test_no_way_to_the_others_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ResourceError, match="HORO_NETWORK_INTERFACES"):
        listen_addresses("127.0.0.1", ["127.0.0.1", "203.0.113.9", None], same_machine=False, wanted=None)


def test_names_and_networks_choose_what_this_machine_has() -> None:
    assert select_addresses("ib0", AVAILABLE) == ["10.1.4.3", "fd00:7::3"]
    assert select_addresses(" eth0 , eth9,10.1.0.0/16,", AVAILABLE) == ["192.168.7.3", "10.1.4.3"]
    assert select_addresses("fd00:7::/64", AVAILABLE) == ["fd00:7::3"]
    assert select_addresses("192.168.7.3", AVAILABLE) == ["192.168.7.3"]


@pytest.mark.parametrize("wanted", ["eth9", "172.16.0.0/12", "down0", ","])
def test_choice_that_matches_nothing_lists_what_there_is(wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        select_addresses(wanted, AVAILABLE)
    assert f"HORO_NETWORK_INTERFACES={wanted!r} matches no interface or address here" in str(caught.value)
    assert "lo 127.0.0.1 ::1; eth0 192.168.7.3; ib0 10.1.4.3 fd00:7::3" in str(caught.value)


@pytest.mark.parametrize("item", ["10.1/x", "10.1.0.0/33", "eth0/1"])
def test_a_network_that_is_none_is_named_even_beside_an_interface(item: str) -> None:
    with pytest.raises(UsageError, match=f"'{item}' is not a network; a network is written like 10.1.0.0/16"):
        select_addresses(f"eth0,{item}", AVAILABLE)


def test_interfaces_have_the_addresses_that_psutil_finds() -> None:
    inet = {socket.AF_INET, socket.AF_INET6}
    found = {
        name: sorted(entry.address for entry in entries if entry.family in inet and "%" not in entry.address)
        for name, entries in psutil.net_if_addrs().items()
    }
    assert {name: sorted(addresses) for name, addresses in interface_addresses().items()} == found
    assert "127.0.0.1" in found["lo"]


def test_choice_by_the_user_decides_alone() -> None:
    assert listen_addresses("10.9.9.9", ["10.9.9.8"], same_machine=True, wanted="lo") == interface_addresses()["lo"]


def test_route_to_loopback_starts_at_loopback() -> None:
    assert route_source("127.0.0.5") is not None
    assert is_loopback(str(route_source("127.0.0.5")))
    with pytest.raises(UsageError, match="h1"):
        route_source("h1")


def test_loopback_is_recognized_in_every_notation() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("10.0.0.1", "fd00::1", "::ffff:10.0.0.1", "0.0.0.0")))


def test_listeners_fall_back_to_ports_of_their_own_only_if_they_must() -> None:
    listeners = bind_all(["127.0.0.1", "127.0.0.1", "127.0.0.2"])
    assert len(listeners) == 2
    assert len({listener.getsockname()[1] for listener in listeners}) == 1
    for listener in listeners:
        listener.close()
    with pytest.raises(UsageError, match="no address"):
        bind_all([])


def test_listeners_keep_to_the_ports_that_are_named() -> None:
    few = range(21240, 21280)  # below those from which systems choose
    (listener,) = bind_all(["127.0.0.2"], ports=few)
    with listener:
        assert listener.getsockname()[1] in few
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError) as caught:
            bind_all(["127.0.0.2", "127.0.0.1"], ports=range(port, port + 1))
        said = f"none of the ports {port} to {port} (HORO_PORT_RANGE) is free here: cannot listen on 127.0.0.1:{port}"
        assert said in str(caught.value)
