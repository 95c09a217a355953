"""Peer info survives the store, and places are counted as in Horovod."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horo.bootstrap.host.grouping import group_ranks
from horo.bootstrap.host.identity import Identity, read_identity
from horo.bootstrap.launchers.variables import Launch
from horo.bootstrap.peer_info import PeerInfo, check_agreement, core_count, place_of, places_alike
from horo.config.table import Config, read_config
from horo.errors import MismatchError

PEER_INFO = PeerInfo.of(Launch("none", 0, 1, "h\u00f6st"), Config(), read_identity("label"), "fd00::1", "1+abi1")


def name(rank: int, host: str) -> str:
    return f"rank {rank} ({host})"


def test_peer_info_survives_the_store() -> None:
    assert PeerInfo.decode(PEER_INFO.encode()) == PEER_INFO
    other = replace(PEER_INFO, local=(1, 4), node=3, address=None, cpus=1 << 300 | 5)
    assert PeerInfo.decode(other.encode()) == other


def test_identity_of_a_process_is_stable_and_a_label_keeps_it_apart() -> None:
    assert read_identity(None) == read_identity("")
    assert read_identity("a") != read_identity("b")
    assert read_identity("a").machine == read_identity("b").machine


def test_other_version_is_named_even_if_it_encodes_everything_else_differently() -> None:
    strange = b'{"horo": "9.0", "core": "9.0+abi7", "host": "h2", "shape": "unknown"}'
    with pytest.raises(MismatchError) as caught:
        check_agreement([PEER_INFO.encode(), PEER_INFO.encode(), strange], name)
    assert "rank 0 (h\u00f6st) runs horo 0.1.0 (core 1+abi1), rank 2 (h2) runs horo 9.0 (core 9.0+abi7)" in str(
        caught.value
    )


def test_a_default_that_another_setting_gives_is_compared_and_names_that() -> None:
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
    others = [
        Identity("other", 1, 0, ""),
        Identity("boot", 2, 0, ""),
        Identity("boot", 1, 5, ""),
        Identity("boot", 1, 0, "x"),
    ]
    assert group_ranks([base, *others, base]).host_of_rank == (0, 1, 2, 3, 4, 0)
