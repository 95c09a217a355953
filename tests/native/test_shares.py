"""How data is cut among owners, and that the room for what travels holds every share."""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

LINE_BYTES = 64


def shares(native: ModuleType, count: int, owners: int) -> list[tuple[int, int]]:
    offset, length = native.ffi.new("size_t *"), native.ffi.new("size_t *")
    found = []
    for index in range(owners):
        native.lib.shim_share(count, index, owners, offset, length)
        found.append((offset[0], length[0]))
    return found


@given(count=st.integers(0, 1 << 22), owners=st.integers(1, 200))
def test_shares_are_whole_lines_and_cover_everything_in_order(native: ModuleType, count: int, owners: int) -> None:
    end = 0
    for offset, length in shares(native, count, owners):
        assert offset == end and (length == 0 or offset % LINE_BYTES == 0)
        end = offset + length
    assert end == count


@given(count=st.integers(0, 1 << 22), owners=st.integers(1, 200), data=st.data())
def test_no_share_of_a_shorter_segment_is_longer_than_the_bound(
    native: ModuleType, count: int, owners: int, data: st.DataObject
) -> None:
    most = native.lib.shim_share_most(count, owners)
    shorter = data.draw(st.integers(0, count), "shorter")
    assert max(length for _, length in shares(native, shorter, owners)) <= most
    assert most - max(length for _, length in shares(native, count, owners)) < LINE_BYTES


@pytest.mark.parametrize("segment_bytes", [4096, 8192, 1 << 16, 1 << 18, 1 << 20])
@pytest.mark.parametrize("hosts", [2, 3, 8, 129, 256, 300])
def test_scratch_holds_every_share_of_every_segment(native: ModuleType, hosts: int, segment_bytes: int) -> None:
    """Also where the last segment is shorter, but cut so that somebody's share of it is longer."""
    for owners in (*range(1, 14), 24, 33, 48, 63, 64, 100):
        reserved = native.lib.shim_two_level_reserved(hosts, owners, 4, segment_bytes)
        for cut in (0, 1, 64, 65, 128, 192, 320, segment_bytes // 2, segment_bytes - 1):
            for index in range(owners):
                needed = native.lib.shim_two_level_needed(hosts, owners, 4, segment_bytes - cut, index)
                assert needed <= reserved, (owners, cut, index)
