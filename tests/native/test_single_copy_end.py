"""A rank that still reads another one's memory when the group ends: what it reads then may be anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from doubles import build_double
from ranks import run_script

# Rank 1 is held in its last read of what rank 0 sends, whose part is over by then. Rank 0 ends the group, its call
# fails, and it writes to its memory; then rank 1 reads.
SCRIPT = """
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
    said = run_script(SCRIPT, reads, LD_PRELOAD=preload, HELD_BY=str(tmp_path / "fifo"))
    assert said.startswith("PeerLostError rank 0 (host0) ended with enough"), said
