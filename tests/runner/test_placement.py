"""Which rank runs where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horo.runner.job.placement import PlacementError, place

slot_lists = st.lists(st.integers(1, 8), min_size=1, max_size=12)


def test_ranks_fill_hosts_in_order() -> None:
    placed = place([2, 1, 3], 5)
    assert [s.host for s in placed] == [0, 0, 1, 2, 2]
    assert [(s.local_rank, s.local_size) for s in placed] == [(0, 2), (1, 2), (0, 1), (0, 2), (1, 2)]
    assert [(s.cross_rank, s.cross_size) for s in placed] == [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2)]


@given(slot_lists, st.data())
def test_every_rank_has_a_consistent_place(slots: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, sum(slots)))
    placed = place(slots, size)
    assert [slot.rank for slot in placed] == list(range(size))
    assert [slot.host for slot in placed] == sorted(slot.host for slot in placed)
    for host, available in enumerate(slots):
        local = [slot for slot in placed if slot.host == host]
        assert [slot.local_rank for slot in local] == list(range(len(local)))
        assert all(slot.local_size == len(local) <= available for slot in local)
    for local_rank in range(max(slots)):
        column = [slot for slot in placed if slot.local_rank == local_rank]
        assert [slot.cross_rank for slot in column] == list(range(len(column)))
        assert all(slot.cross_size == len(column) for slot in column)


@given(slot_lists, st.data())
def test_ranks_are_shared_out_evenly_as_far_as_slots_allow(slots: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, sum(slots)))
    placed = place(slots, size, evenly=True)
    counts = [sum(1 for slot in placed if slot.host == host) for host in range(len(slots))]
    assert [slot.host for slot in placed] == sorted(slot.host for slot in placed)
    assert sum(counts) == size
    for count, available in zip(counts, slots, strict=True):
        assert count <= available
        assert count in (available, max(counts), max(counts) - 1)
    assert [slot.host for slot in place([8, 8], 5, evenly=True)] == [0, 0, 0, 1, 1]


@given(slot_lists, st.integers(1, 20))
def test_too_many_ranks_are_an_error_with_both_numbers_unless_allowed(slots: list[int], more: int) -> None:
    size = sum(slots) + more
    with pytest.raises(PlacementError) as error:
        place(slots, size)
    assert f"{size} ranks" in str(error.value)
    assert f"{sum(slots)} slot" in str(error.value)
    counts = [0] * len(slots)
    for slot in place(slots, size, oversubscribe=True):
        counts[slot.host] += 1
    extra = [count - available for count, available in zip(counts, slots, strict=True)]
    assert sum(counts) == size
    assert max(extra) - min(extra) <= 1


def test_a_host_takes_no_more_than_its_most() -> None:
    placed = place([2, 2, 2], 9, oversubscribe=True, most=[2, None, 3])
    assert [slot.host for slot in placed] == [0, 0, 1, 1, 1, 1, 2, 2, 2]
    with pytest.raises(PlacementError, match="-np 5 asks for 5 ranks but max_slots allows 4: name more hosts"):
        place([1, 1], 5, oversubscribe=True, most=[2, 2])


@pytest.mark.parametrize(("slots", "size"), [([1], 0), ([1], -3), ([], 1), ([0], 1)])
def test_nothing_to_place_is_an_error(slots: list[int], size: int) -> None:
    with pytest.raises(PlacementError):
        place(slots, size)
