"""Small parts of the core, each by itself; the memory of a host on kernels with larger pages; too little memory."""

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from doubles import build_double
from hypothesis import given
from hypothesis import strategies as st
from jobs import in_child
from ranks import Group, Rank, run_script, wait_for

from horo.errors import PeerLostError

# ---- A forked child is known for one, with and without a page that a fork wipes ----


@pytest.mark.parametrize("by_pid", [False, True])
def test_a_child_is_told_from_its_parent(native: ModuleType, by_pid: bool) -> None:
    owner = native.lib.shim_owner_create(by_pid)
    assert native.lib.shim_owner_is_here(owner) == 1
    assert in_child(lambda: in_child(lambda: native.lib.shim_owner_is_here(owner))) == 0
    assert native.lib.shim_owner_is_here(owner) == 1
    native.lib.shim_owner_destroy(owner)


# ---- A thread of a GPU's driver may look at a request until its staging has been let go of. At the end of a group the
# newest request fails first, and others may free it before one more is submitted ----


def test_a_request_outlives_what_it_carries_and_a_call_is_behind_none_that_has_failed(native: ModuleType) -> None:
    assert native.lib.shim_request_outlives_cargo() == 1
    assert native.lib.shim_request_call_behind_failed_ones() == 1


# ---- The time for which data moved while a thread waited, from tick 100 to 200 ----


@pytest.mark.parametrize(("begin", "end", "moved"), [(50, 120, 20), (110, 150, 40), (110, 0, 90), (205, 0, 0)])
def test_data_moves_for_the_part_of_a_batch_that_lies_in_a_wait(
    native: ModuleType, begin: int, end: int, moved: int
) -> None:
    """At 205 the waiting thread has read the clock for the last time."""
    assert native.lib.shim_meter(begin, end) == moved


# ---- The memory and the wake-up descriptors that ranks of a host share ----


@pytest.fixture
def make(native: ModuleType) -> Callable[..., tuple[int, int, str]]:
    """Calls ``horo_create_memory`` or ``horo_create_wake``: its status, the descriptor and the sentence."""

    def call(what: str, *words: int) -> tuple[int, int, str]:
        out, error = native.ffi.new("int32_t *", -1), native.ffi.new("char[]", native.lib.HORO_MESSAGE_MAX)
        status = getattr(native.lib, f"horo_create_{what}")(*words, out, error, native.lib.HORO_MESSAGE_MAX)
        return status, out[0], native.ffi.string(error).decode()

    return call


def test_memory_is_zero_and_grows_but_never_shrinks(make: Callable[..., tuple[int, int, str]]) -> None:
    status, memory, _ = make("memory", 10_000)
    assert status == 0
    try:
        assert os.pread(memory, 20_000, 0) == bytes(10_000)
        assert fcntl.fcntl(memory, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        os.ftruncate(memory, 20_000)
        with pytest.raises(PermissionError):
            os.ftruncate(memory, 19_999)
        with pytest.raises(PermissionError):
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    finally:
        os.close(memory)


def test_a_wake_is_an_eventfd_that_blocks_nobody(make: Callable[..., tuple[int, int, str]]) -> None:
    status, wake, _ = make("wake")
    assert status == 0
    try:
        assert fcntl.fcntl(wake, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        with pytest.raises(BlockingIOError):
            os.read(wake, 8)
        os.eventfd_write(wake, 3)
        assert os.eventfd_read(wake) == 3
    finally:
        os.close(wake)


# ---- How data is cut among owners, and that the room for what travels holds every share ----


LINE_BYTES = 64


def shares(native: ModuleType, count: int, owners: int) -> list[tuple[int, int]]:
    offset, length = native.ffi.new("size_t *"), native.ffi.new("size_t *")
    found = []
    for index in range(owners):
        native.lib.shim_share(count, index, owners, offset, length)
        found.append((offset[0], length[0]))
    return found


@given(count=st.integers(0, 1 << 24), owners=st.integers(1, 200))
def test_shares_are_whole_lines_and_cover_everything_in_order(native: ModuleType, count: int, owners: int) -> None:
    end = 0
    for offset, length in shares(native, count, owners):
        assert offset == end
        end = offset + length
        assert end == count or end % LINE_BYTES == 0
    assert end == count


@given(count=st.integers(0, 1 << 24), owners=st.integers(1, 200), data=st.data())
def test_no_shorter_segment_has_longer_shares(native: ModuleType, count: int, owners: int, data: st.DataObject) -> None:
    most = native.lib.shim_share_most(count, owners)
    shorter = data.draw(st.integers(0, count), "shorter")
    assert max(length for _, length in shares(native, shorter, owners)) <= most
    assert most - max(length for _, length in shares(native, count, owners)) < LINE_BYTES


@pytest.mark.parametrize("segment_bytes", [4096, 8192, 1 << 16, 1 << 18, 1 << 20])
@pytest.mark.parametrize("hosts", [2, 3, 8, 129, 256, 300])
@pytest.mark.parametrize("value", [1, 4, 16])
def test_scratch_holds_every_share_of_segments(native: ModuleType, value: int, hosts: int, segment_bytes: int) -> None:
    """Also where the last segment is shorter, but cut so that somebody's share of it is longer."""
    for owners in (*range(1, 14), 24, 33, 48, 63, 64, 100):
        reserved = native.lib.shim_two_level_reserved(hosts, owners, value, segment_bytes)
        for cut in (0, 1, 64, 65, 128, 192, 320, segment_bytes // 2, segment_bytes - 1):
            for index in range(owners):
                shorter = max(segment_bytes - -(-cut // value) * value, 0)
                needed = native.lib.shim_two_level_needed(hosts, owners, value, shorter, index)
                assert needed <= reserved, (owners, cut, index)


# ---- Who wakes a sleeper first clears its mark and then writes its eventfd; it may die in between ----


@pytest.mark.parametrize("sleeper", [0, 1, 2])
def test_a_sleeper_whose_waker_died_hears_of_the_death(native: ModuleType, sleeper: int) -> None:
    """The waker is the rank that dies: its mark is all that it has changed."""
    size, segment_bytes, victim = 4, 1 << 16, 3
    submitted = threading.Barrier(victim)

    def body(rank: Rank) -> None:
        handle = rank.submit("allreduce", "x", [np.ones(100_000)], reduce_op=1)
        submitted.wait(20)
        if rank.rank == sleeper:
            memory = native.ffi.cast("void *", group.arena_address(0))
            wait_for(lambda: native.lib.shim_arena_clear_sleeping(memory, size, segment_bytes, sleeper) == 1)
            group.kill(victim)
        wait_for(lambda: rank.context.poll(handle))  # nobody waits: the background thread alone must hear
        with pytest.raises(PeerLostError, match=rf"rank {victim} "):
            rank.finish(handle)

    with Group([size], spin_us=0, segment_bytes=segment_bytes) as group:
        group.run(body, ranks=range(victim))


# Two ranks map the memory of their host by its descriptor. What a process set has used is given back with it.
SHARING = """
from concurrent.futures import ThreadPoolExecutor
from fabric import make_setups
from horo.core import context, memory

page, segment = map(int, sys.argv[1:])
for teams in 1, 2, 3:
    assert memory.arena_bytes(3, segment, teams) % page == 0
setups = make_setups([2], segment_bytes=segment)
memory = os.dup(setups[0].arena_fd)
ranks = [Rank(context.Context(setup)) for setup in setups]
blocks = []

def check(rank, **options):
    for count in 3, 300_000:
        array = np.arange(count) + float(rank.rank)
        rank.allreduce(array, f"x{count}", **options)
        assert np.array_equal(array, 2.0 * np.arange(count) + 1)

def body(rank):
    check(rank)
    for turn in range(3):
        rank.barrier(f"before {turn}")
        if rank.rank == 0:
            blocks.append(os.fstat(memory).st_blocks)
        team = rank.context.add_team([0, 1])
        check(rank, team=team)
        rank.context.remove_team(team)
    rank.barrier("end")
    rank.context.destroy()

with ThreadPoolExecutor() as pool:
    [*pool.map(body, ranks)]
print(*blocks, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(("page", "segment"), [(1 << 14, 4096), (1 << 16, 3 * 4096), (1 << 14, 1 << 18)])
def test_ranks_share_memory_in_larger_pages(tmp_path: Path, page: int, segment: int) -> None:
    double = build_double("libpages.so", tmp_path, PAGE_BYTES=page)
    preload = ":".join(filter(None, [os.environ.get("LD_PRELOAD"), str(double)]))
    said = run_script(SHARING, page, segment, LD_PRELOAD=preload)
    first, second, third = map(int, said.split())
    few = 8 * page // 512  # the words of the set that are cleared one by one
    assert second <= first + few and third <= second + few, "what the process set has used is still there"


# Rank 0 of two hosts begins as often as it takes until none of the core's allocations is refused.
BEGINNING = """
from fabric import make_setups
from horo.core import context
from horo.errors import ResourceError

left = ctypes.c_int.in_dll(ctypes.CDLL(None), "hr_refused")
kept, reasons = [], []
while left.value == 0:
    setup = make_setups([1, 1])[0]
    descriptors = os.listdir("/proc/self/fd")
    left.value = len(kept) + len(reasons) + 1
    try:
        kept.append(context.Context(setup))
    except ResourceError as error:
        reasons.append(str(error))
        assert os.listdir("/proc/self/fd") == descriptors, error
print(*sorted(set(reasons)), sep="; ", flush=True)
os._exit(0)
"""


@pytest.mark.skipif(bool(os.environ.get("HORO_SANITIZE")), reason="the sanitizer is loaded in the place of the double")
def test_a_rank_that_begins_without_memory_names_what_there_is_none_for(tmp_path: Path) -> None:
    said = run_script(BEGINNING, LD_PRELOAD=str(build_double("libmemory.so", tmp_path)))
    assert "out of memory for a context" in said
    assert "no memory for the link to host 1" in said
