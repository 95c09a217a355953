"""Hosts and places of ranks: grouping, identities, addresses, and what carries the data between hosts."""

import logging
import mmap
import os
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from fabric import close_setup, make_setups
from hypothesis import given
from hypothesis import strategies as st

from horo.bootstrap.auth.handshake import Purpose
from horo.bootstrap.host.grouping import Grouping, control_peers, data_peers, group_ranks
from horo.bootstrap.host.identity import Identity, read_identity
from horo.bootstrap.launchers.variables import Launch
from horo.bootstrap.mpi.data import carries_data, check_mpi
from horo.bootstrap.net import interfaces
from horo.bootstrap.net.addresses import bind_all
from horo.bootstrap.net.interfaces import (
    interface_addresses,
    is_loopback,
    listen_addresses,
    route_source,
    select_addresses,
)
from horo.bootstrap.peer_info import PeerInfo, check_agreement, core_count, place_of, places_alike
from horo.config.table import Config, read_config
from horo.errors import MismatchError, ResourceError, UsageError

placements = st.lists(st.integers(0, 9), min_size=1, max_size=40)


@given(placements)
def test_hosts_are_numbered_by_their_lowest_rank_and_every_link_is_seen_from_both_ends(keys: list[int]) -> None:
    grouping = group_ranks(keys)
    leaders = [ranks[0] for ranks in grouping.hosts]
    assert leaders == sorted(leaders)
    assert sorted(rank for ranks in grouping.hosts for rank in ranks) == list(range(len(keys)))
    for rank in range(len(keys)):
        assert {keys[other] for other in grouping.members(rank)} == {keys[rank]}
        assert grouping.members(rank)[grouping.local_index(rank)] == rank
    grouping = group_ranks(keys)
    seen = [(link.purpose, rank, link.peer) for rank in range(grouping.size) for link in grouping.links(rank)]
    assert len(set(seen)) == len(seen)
    assert {(purpose, peer, rank) for purpose, rank, peer in seen} == set(seen)
    hosts, owners = len(grouping.hosts), grouping.owner_count
    assert sum(purpose is Purpose.CONTROL for purpose, _, _ in seen) == 2 * (hosts - 1)
    data = [(grouping.local_index(rank), rank, peer) for purpose, rank, peer in seen if purpose is Purpose.DATA]
    assert all(index == grouping.local_index(peer) < owners for index, _, peer in data)
    assert len(data) == owners * hosts * len(data_peers(0, hosts))


@given(placements, st.integers(0, 8))
def test_a_data_link_has_as_many_streams_as_asked_for(keys: list[int], sockets: int) -> None:
    grouping = group_ranks(keys)
    for rank in range(grouping.size):
        single, several = grouping.links(rank), grouping.links(rank, sockets)
        control = [link for link in single if link.purpose is Purpose.CONTROL]
        data = [link for link in single if link.purpose is Purpose.DATA]
        assert several == control + [link._replace(number=number) for link in data for number in range(sockets)]


@given(st.integers(1, 300))
def test_a_tree_reaches_every_host_and_data_links_lead_a_power_of_two_round_the_ring(count: int) -> None:
    parents = {child: host for host in range(count) for child in control_peers(host, count) if child > host}
    assert set(parents) == set(range(1, count))
    above = {(host, min(control_peers(host, count))) for host in range(1, count)}
    assert above == set(parents.items())
    pairs = {(host, other) for host in range(count) for other in data_peers(host, count)}
    assert pairs == {(other, host) for host, other in pairs}
    distances = {1 << bit for bit in range(10)}
    assert pairs == {
        (host, other)
        for host in range(count)
        for other in range(count)
        if host != other and ({(host - other) % count, (other - host) % count} & distances)
    }


def test_arena_memory_cannot_be_made_shorter() -> None:
    (setup,) = make_setups([1])
    with pytest.raises(PermissionError):
        os.ftruncate(setup.arena_fd, 1)
    with mmap.mmap(setup.arena_fd, 0) as memory:
        assert memory[:64] == bytes(64)
    assert not os.get_inheritable(setup.arena_fd)
    close_setup(setup)


PEER_INFO = PeerInfo.of(Launch("none", 0, 1, "h\u00f6st"), Config(), read_identity("label"), "fd00::1", "1+abi1")


def name(rank: int, host: str) -> str:
    return f"rank {rank} ({host})"


def test_peer_info_survives_the_store_and_a_label_keeps_identities_apart() -> None:
    assert PeerInfo.decode(PEER_INFO.encode()) == PEER_INFO
    other = replace(PEER_INFO, local=(1, 4), node=3, address=None, cpus=1 << 300 | 5)
    assert PeerInfo.decode(other.encode()) == other
    assert read_identity(None) == read_identity("")
    assert read_identity("a") != read_identity("b")
    assert read_identity("a").machine == read_identity("b").machine


def test_another_version_is_named_and_so_is_a_default_that_another_setting_gives() -> None:
    strange = b'{"horo": "9.0", "core": "9.0+abi7", "host": "h2", "shape": "unknown"}'
    with pytest.raises(MismatchError) as caught:
        check_agreement([PEER_INFO.encode(), PEER_INFO.encode(), strange], name)
    said = "rank 0 (h\u00f6st) runs horo 0.1.0 (core 1+abi1), rank 2 (h2) runs horo 9.0 (core 9.0+abi7)"
    assert said in str(caught.value)
    assert "install the same version on all hosts" in str(caught.value)
    launch = Launch("none", 0, 1, "h")
    configs = [read_config({}), read_config({"HORO_HOROVOD": "1"}), read_config({}, {"gradients_ready": "backward"})]
    plain, horovod, same = (PeerInfo.of(launch, each, read_identity(None), None, "1").encode() for each in configs)
    check_agreement([plain, same], name)
    with pytest.raises(MismatchError) as caught:
        check_agreement([plain, horovod], name)
    expected = "gradients_ready is backward (default) on rank 0 (h) and step (HORO_HOROVOD) on rank 1 (h); it must be"
    assert expected in str(caught.value)


def test_cores_of_ranks_bound_apart_add_up() -> None:
    bound = [replace(PEER_INFO, cpus=0b0011), replace(PEER_INFO, cpus=0b0110)]
    assert core_count(bound) == 3


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_places_number_every_host_and_every_cross_group_without_gaps(nodes: list[int]) -> None:
    arenas = group_ranks(list(range(len(nodes))))  # no memory is shared at all: the launcher's numbers are used
    peers = [replace(PEER_INFO, node=node) for node in nodes]
    places = [place_of(Launch("torchrun", rank, len(nodes), "h"), peers, arenas) for rank in range(len(nodes))]
    for node in set(nodes):
        own = [place for place, other in zip(places, nodes, strict=True) if other == node]
        assert [place.local_rank for place in own] == list(range(len(own)))
        assert {place.local_size for place in own} == {len(own)}
    for local_rank in {place.local_rank for place in places}:
        across = [place for place in places if place.local_rank == local_rank]
        assert sorted(place.cross_rank for place in across) == list(range(len(across)))
        assert {place.cross_size for place in across} == {len(across)}
    counts = {nodes.count(node) for node in nodes}
    assert places_alike(peers, arenas) == (len(counts) == 1)


@given(st.data())
def test_places_under_any_placement_and_any_order_of_local_ranks(data: st.DataObject) -> None:
    """Slots unequal, placed in blocks, in turn or anyhow; the launcher numbers the ranks of a host as it likes."""
    slots = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    blocks = [node for node, count in enumerate(slots) for _ in range(count)]
    in_turn = [node for turn in range(max(slots)) for node, count in enumerate(slots) if turn < count]
    nodes = data.draw(st.sampled_from([blocks, in_turn]) | st.permutations(blocks))
    orders = [data.draw(st.permutations(range(count))) for count in slots]
    local_ranks = [orders[node][nodes[:rank].count(node)] for rank, node in enumerate(nodes)]
    locals_ = [(local, slots[node]) for local, node in zip(local_ranks, nodes, strict=True)]
    peers = [replace(PEER_INFO, node=node, local=local) for node, local in zip(nodes, locals_, strict=True)]
    arenas = group_ranks(nodes)
    first = {node: nodes.index(node) for node in nodes}  # hosts are numbered by their lowest rank
    for rank, (node, local) in enumerate(zip(nodes, locals_, strict=True)):
        place = place_of(Launch("slurm", rank, len(nodes), "h", local=local, node=node), peers, arenas)
        across = sorted((other for other, count in enumerate(slots) if count > local[0]), key=first.__getitem__)
        assert place == (*local, across.index(node), len(across))
    assert places_alike(peers, arenas) == (len(set(slots)) == 1)


def test_identities_differ_by_every_part() -> None:
    base = Identity("boot", 1, 0, "")
    parts = ("other", 1, 0, ""), ("boot", 2, 0, ""), ("boot", 1, 5, ""), ("boot", 1, 0, "x")
    others = [Identity(*each) for each in parts]
    assert group_ranks([base, *others, base]).host_of_rank == (0, 1, 2, 3, 4, 0)


AVAILABLE = {"lo": ["127.0.0.1", "::1"], "eth0": ["192.168.7.3"], "ib0": ["10.1.4.3", "fd00:7::3"], "down0": []}


def test_peers_connect_on_loopback_or_where_routes_lead_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "route_source", {"10.1.4.9": "10.1.4.3", "192.168.7.9": "192.168.7.3"}.get)

    def met(store: str | None, others: list[str | None], same_machine: bool = False) -> list[str]:
        return listen_addresses(store, others, same_machine=same_machine, wanted=None)

    for store in ("127.0.0.1", "192.168.7.3", None):
        assert met(store, [], True) == ["127.0.0.1"]
    assert met("127.0.0.1", ["10.1.4.9", "10.1.4.9"]) == ["10.1.4.3"]  # beside the store
    assert met("192.168.7.3", ["127.0.0.1"]) == ["192.168.7.3"]  # away from it
    both = met("192.168.7.3", ["10.1.4.9", "192.168.7.9", None], True)
    assert both == ["192.168.7.3", "10.1.4.3", "127.0.0.1"]
    with pytest.raises(ResourceError, match="HORO_NETWORK_INTERFACES"):
        met("127.0.0.1", ["127.0.0.1", "203.0.113.9", None])


def test_names_and_networks_choose_what_this_machine_has() -> None:
    assert select_addresses("ib0", AVAILABLE) == ["10.1.4.3", "fd00:7::3"]
    assert select_addresses(" eth0 , eth9,10.1.0.0/16,", AVAILABLE) == ["192.168.7.3", "10.1.4.3"]
    assert select_addresses("fd00:7::/64", AVAILABLE) == ["fd00:7::3"]
    assert select_addresses("192.168.7.3", AVAILABLE) == ["192.168.7.3"]
    # That of the user decides alone.
    assert listen_addresses("10.9.9.9", ["10.9.9.8"], same_machine=True, wanted="lo") == interface_addresses()["lo"]


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


def test_interfaces_have_the_addresses_that_psutil_finds_and_loopback_is_recognized() -> None:
    inet = {socket.AF_INET, socket.AF_INET6}
    found = {
        name: sorted(entry.address for entry in entries if entry.family in inet and "%" not in entry.address)
        for name, entries in psutil.net_if_addrs().items()
    }
    assert {name: sorted(addresses) for name, addresses in interface_addresses().items()} == found
    assert "127.0.0.1" in found["lo"]
    assert route_source("127.0.0.5") is not None
    assert is_loopback(str(route_source("127.0.0.5")))
    with pytest.raises(UsageError, match="h1"):
        route_source("h1")
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("10.0.0.1", "fd00::1", "::ffff:10.0.0.1", "0.0.0.0")))


def test_listeners_share_a_port_if_they_can_and_keep_to_those_that_are_named() -> None:
    listeners = bind_all(["127.0.0.1", "127.0.0.1", "127.0.0.2"])
    assert len(listeners) == 2
    assert len({listener.getsockname()[1] for listener in listeners}) == 1
    for listener in listeners:
        listener.close()
    with pytest.raises(UsageError, match="no address"):
        bind_all([])
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


ONE_HOST, TWO_HOSTS = Grouping((0, 0)), Grouping((0, 1))


def world(multiple: bool = True) -> Any:
    level = "MPI_THREAD_MULTIPLE" if multiple else "MPI_THREAD_FUNNELED"
    return SimpleNamespace(rank=0, library="Fake MPI 1.0", thread_level=level, threads_multiple=multiple)


@pytest.mark.parametrize(
    ("settings", "grouping", "carries"),
    [
        ({}, ONE_HOST, False), ({}, TWO_HOSTS, True), ({"transport": "mpi"}, TWO_HOSTS, True),
        ({"transport": "mpi"}, ONE_HOST, False), ({"transport": "tcp"}, TWO_HOSTS, False),
    ],
)  # fmt: skip
def test_what_mpi_carries(settings: dict[str, str], grouping: Grouping, carries: bool) -> None:
    config = Config(**settings)
    check_mpi(config, world())
    assert carries_data(config, world(), [True, True], grouping) == carries
    assert not carries_data(config, None, [False, False], grouping)


def test_one_rank_that_may_not_call_mpi_on_threads_keeps_all_on_tcp(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "horo")
    assert not carries_data(Config(), world(), [True, False], TWO_HOSTS)
    assert "by TCP, not by Fake MPI 1.0" in caplog.text
    caplog.clear()
    assert not carries_data(Config(), world(False), [False, False], ONE_HOST)
    assert not carries_data(Config(transport="tcp"), world(False), [False, False], TWO_HOSTS)
    assert caplog.text == ""


def test_what_cannot_be_is_told_with_the_way_out() -> None:
    config = Config(transport="mpi")
    told = "HORO_TRANSPORT=mpi, but"
    with pytest.raises(UsageError, match=f"{told} the ranks of this job did not start through MPI"):
        check_mpi(config, None)
    with pytest.raises(UsageError, match=f"{told} Fake MPI 1.0 runs with MPI_THREAD_FUNNELED.*'multiple'"):
        check_mpi(config, world(False))
