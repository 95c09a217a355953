"""Grouping and the fabric of test ranks: every stream has two ends, and they are the right ones."""

from __future__ import annotations

import mmap
import os

import pytest
from fabric import close_setup, make_setups
from hypothesis import given
from hypothesis import strategies as st

from horo.bootstrap.auth.handshake import Purpose
from horo.bootstrap.host.grouping import control_peers, data_peers, group_ranks

placements = st.lists(st.integers(0, 9), min_size=1, max_size=40)


@given(placements)
def test_hosts_are_numbered_by_their_lowest_rank_and_partition_the_ranks(keys: list[int]) -> None:
    grouping = group_ranks(keys)
    leaders = [ranks[0] for ranks in grouping.hosts]
    assert leaders == sorted(leaders)
    assert sorted(rank for ranks in grouping.hosts for rank in ranks) == list(range(len(keys)))
    for rank in range(len(keys)):
        assert {keys[other] for other in grouping.members(rank)} == {keys[rank]}
        assert grouping.members(rank)[grouping.local_index(rank)] == rank


@given(placements)
def test_every_link_is_seen_from_both_ends_once(keys: list[int]) -> None:
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
def test_tree_reaches_every_host_from_the_root(count: int) -> None:
    parents = {child: host for host in range(count) for child in control_peers(host, count) if child > host}
    assert set(parents) == set(range(1, count))
    above = {(host, min(control_peers(host, count))) for host in range(1, count)}
    assert above == set(parents.items())


@given(st.integers(1, 300))
def test_data_links_have_two_ends_and_lead_a_power_of_two_round_the_ring(count: int) -> None:
    pairs = {(host, other) for host in range(count) for other in data_peers(host, count)}
    assert pairs == {(other, host) for host, other in pairs}
    distances = {1 << bit for bit in range(10)}
    assert pairs == {
        (host, other)
        for host in range(count)
        for other in range(count)
        if host != other and ({(host - other) % count, (other - host) % count} & distances)
    }


@pytest.mark.parametrize(
    ("count", "peers"),
    [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 4), (7, 6), (8, 5), (16, 7), (64, 11), (100, 14), (1024, 19)],
)
def test_a_rank_has_few_data_links_however_many_hosts_there_are(count: int, peers: int) -> None:
    assert {len(data_peers(host, count)) for host in range(count)} == {peers}


def test_arena_memory_cannot_be_made_shorter() -> None:
    (setup,) = make_setups([1])
    with pytest.raises(PermissionError):
        os.ftruncate(setup.arena_fd, 1)
    with mmap.mmap(setup.arena_fd, 0) as memory:
        assert memory[:64] == bytes(64)
    assert not os.get_inheritable(setup.arena_fd)
    close_setup(setup)
