"""How data is cut among owners, and that the room for what travels holds every share."""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

LINE_BYTES = 64
BLOCKS = [1, 2, 4, 8, 9, 33, 68, 260, 4096]
"""Bytes of a block: elements, and values with a scale."""

by_block = pytest.mark.parametrize("block", BLOCKS)


def shares(native: ModuleType, block: int, count: int, owners: int) -> list[tuple[int, int]]:
    offset, length = native.ffi.new("size_t *"), native.ffi.new("size_t *")
    found = []
    for index in range(owners):
        native.lib.shim_share(block, count, index, owners, offset, length)
        found.append((offset[0], length[0]))
    return found


@by_block
@given(blocks=st.integers(0, 1 << 20), owners=st.integers(1, 200))
def test_shares_are_whole_blocks_and_lines_and_cover_everything_in_order(
    native: ModuleType, block: int, blocks: int, owners: int
) -> None:
    """Of lines where these hold whole blocks; else no share but the last is shorter than a line."""
    end = 0
    for offset, length in shares(native, block, blocks * block, owners):
        assert offset == end and length % block == 0
        end = offset + length
        assert end == blocks * block or (end % LINE_BYTES == 0 if LINE_BYTES % block == 0 else length >= LINE_BYTES)
    assert end == blocks * block


@by_block
@given(blocks=st.integers(0, 1 << 20), owners=st.integers(1, 200), data=st.data())
def test_no_share_of_a_shorter_segment_is_longer_than_the_bound(
    native: ModuleType, block: int, blocks: int, owners: int, data: st.DataObject
) -> None:
    most = native.lib.shim_share_most(block, blocks * block, owners)
    shorter = data.draw(st.integers(0, blocks), "shorter")
    assert max(length for _, length in shares(native, block, shorter * block, owners)) <= most
    unit = -(-LINE_BYTES // block) * block
    assert most - max(length for _, length in shares(native, block, blocks * block, owners)) < unit


@pytest.mark.parametrize("segment_bytes", [4096, 8192, 1 << 16, 1 << 18, 1 << 20])
@pytest.mark.parametrize("hosts", [2, 3, 8, 129, 256, 300])
@pytest.mark.parametrize("block", [1, 4, 68, 1000])
def test_scratch_holds_every_share_of_every_segment(
    native: ModuleType, block: int, hosts: int, segment_bytes: int
) -> None:
    """Also where the last segment is shorter, but cut so that somebody's share of it is longer."""
    whole = segment_bytes // block
    for owners in (*range(1, 14), 24, 33, 48, 63, 64, 100):
        reserved = native.lib.shim_two_level_reserved(hosts, owners, block, whole * block)
        for cut in (0, 1, 64, 65, 128, 192, 320, segment_bytes // 2, segment_bytes - 1):
            for index in range(owners):
                shorter = max(whole - -(-cut // block), 0) * block
                needed = native.lib.shim_two_level_needed(hosts, owners, block, shorter, index)
                assert needed <= reserved, (owners, cut, index)
