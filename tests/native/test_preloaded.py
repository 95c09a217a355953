"""Kernels with pages of 16 or 64 KiB, as on servers with aarch64: a library in front of the C library has them."""

import os
from pathlib import Path

import pytest
from doubles import build_double
from ranks import run_script

# Two ranks map the memory of their host by its descriptor. What a process set has used is given back with it.
SHARING = """
import os, sys, threading
import numpy as np
from fabric import make_setups
from ranks import Rank
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

threads = [threading.Thread(target=body, args=(rank,)) for rank in ranks]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
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
