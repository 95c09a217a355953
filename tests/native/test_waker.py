"""Who wakes a sleeper first clears its mark and then writes its eventfd; it may die in between."""

from __future__ import annotations

import threading
from types import ModuleType

import numpy as np
import pytest
from ranks import Group, Rank, wait_for

from horo.errors import PeerLostError


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
