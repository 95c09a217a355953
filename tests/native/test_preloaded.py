"""Programs with a library in front of the C library: larger pages, and a held-up read of another rank's memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from doubles import build_double
from ranks import run_script

# ---- Kernels with pages of 16 or 64 KiB, as on servers with aarch64 ----


# Two ranks map the memory of their host by its descriptor. What a process set has used is given back with it.
SHARING = """
import os, sys, threading
import numpy as np
from fabric import make_setups
from ranks import Rank
from horo.core import context

page, segment = map(int, sys.argv[1:])
for teams in 1, 2, 3:
    assert context.arena_bytes(3, segment, teams) % page == 0
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

threads = [threading.Thread(target=body, args=(rank,)) for rank in ranks]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*blocks)
os._exit(0)
"""


@pytest.mark.parametrize("segment", [4096, 3 * 4096, 1 << 18])
@pytest.mark.parametrize("page", [1 << 14, 1 << 16])
def test_ranks_share_memory_in_larger_pages(tmp_path: Path, page: int, segment: int) -> None:
    double = build_double("libpages.so", tmp_path, PAGE_BYTES=page)
    preload = ":".join(filter(None, [os.environ.get("LD_PRELOAD"), str(double)]))
    said = run_script(SHARING, page, segment, LD_PRELOAD=preload)
    first, second, third = map(int, said.split())
    few = 8 * page // 512  # the words of the set that are cleared one by one
    assert second <= first + few and third <= second + few, "what the process set has used is still there"


# ---- A rank that still reads another one's memory when the group ends: what it reads then may be anything ----


# Rank 1 is held in its last read of what rank 0 sends, whose part is over by then. Rank 0 ends the group, its call
# fails, and it writes to its memory; then rank 1 reads.
READING = """
import os, sys
import numpy as np
from fabric import close_setup, make_setups
from ranks import Rank
from horo.core.context import Context, ffi, lib
from horo.errors import HoroError

AT_ONCE = 1 << 19  # as READ_AT_ONCE of direct.c
setups = make_setups([2], log_level=5)
child = os.fork()
me = 1 if child == 0 else 0
close_setup(setups[1 - me])
rank = Rank(Context(setups[me]))
array = np.full(int(sys.argv[1]) * AT_ONCE - 4, 7 + me, np.uint8)
handle = rank.submit("broadcast", "b", [array], root_rank=0)

def outcome():
    try:
        rank.finish(handle)
    except HoroError as error:
        return f"{type(error).__name__} {error}"
    return f"has {sorted(set(array.tolist()))}"

if me == 1:
    print(outcome(), flush=True)
    os._exit(0)
with open(os.environ["HELD_BY"], "wb"):  # opened once rank 1 has opened it
    status = lib.horo_wait(rank.context._context, handle, 500, ffi.NULL, 0)
    assert status == lib.HORO_IN_PROGRESS  # its part is done meanwhile
    rank.context.end("enough")
    assert outcome().startswith("PeerLostError this rank ended with enough")
    array[:] = 99
os.waitpid(child, 0)
os._exit(0)
"""


@pytest.mark.parametrize("reads", [4, 5, 6])
def test_what_is_read_after_the_end_of_the_group_is_no_result(tmp_path: Path, reads: int) -> None:
    """A turn takes up to three steps before it looks whether the group has ended: of one of these, the last three."""
    double = build_double("libpeer_memory.so", tmp_path, HELD=1 + reads)  # the first two calls are those that try
    os.mkfifo(tmp_path / "fifo")
    preload = ":".join(filter(None, [os.environ.get("LD_PRELOAD"), str(double)]))
    said = run_script(READING, reads, LD_PRELOAD=preload, HELD_BY=str(tmp_path / "fifo"))
    assert said.startswith("PeerLostError rank 0 (host0) ended with enough"), said
