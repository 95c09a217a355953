"""Waiting in a join never ends the job by itself: the others may have more to do, in any team, or without anybody."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from ranks import Rank, on_ranks, run_ranks

from horo.core import context
from horo.errors import StalledError

SUM = context.REDUCE_OPS["sum"]
WARNING_MS, SHUTDOWN_MS = 400, 3000
"""The second is far longer than a busy machine holds up a rank between two steps."""


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def work(rank: Rank, how: str, team: int) -> list[float]:
    """What ranks that have not joined do for longer than ``SHUTDOWN_MS``; when they have gone on."""
    moments = [time.monotonic()]
    if how == "nothing":
        pause(SHUTDOWN_MS / 1000 + 1)
        return moments
    end = moments[0] + SHUTDOWN_MS / 1000 + 1
    is_over = False
    while not is_over:  # all of them stop after the same step
        mine = [np.array([time.monotonic() > end], np.int32)]
        rank.finish(rank.submit("allreduce", "x", mine, reduce_op=SUM, team=team))
        is_over = bool(mine[0][0])
        moments.append(time.monotonic())
        pause(0.02)
    return moments


@pytest.mark.parametrize(
    ("hosts", "how"),
    [([3], "nothing"), ([2, 1], "in the world"), ([1, 2], "in a team")],
    ids=str,
)
@on_ranks("hosts", stall_warning_ms=WARNING_MS, stall_shutdown_ms=SHUTDOWN_MS)
def test_a_join_waits_as_long_as_the_others_need(rank: Rank, how: str) -> None:
    """A team in which nothing happens is joined, too; or only a team works, which the joined rank does not see."""
    members = [1, 2] if how == "in a team" else [0, 1]
    team = rank.context.add_team(members)
    if rank.rank != 0:
        work(rank, how, team if how == "in a team" else 0)
    handles = [rank.context.start_join(joined) for joined in [0, team] if joined == 0 or rank.rank in members]
    rank.finish(*handles)


def test_what_waits_beside_a_join_ends_the_job_as_ever() -> None:
    """Rank 0 has joined, rank 1 waits for rank 2, which does nothing."""
    has_joined, has_ended = threading.Event(), threading.Event()

    def body(rank: Rank) -> None:
        if rank.rank == 2:
            assert has_ended.wait(30)
            return
        with pytest.raises(StalledError, match=r"rank 2"):
            if rank.rank == 0:
                handle = rank.context.start_join(0)
                has_joined.set()
                rank.context.wait(handle)
            else:
                assert has_joined.wait(20)
                rank.allreduce(np.ones(3), "x")
        has_ended.set()

    run_ranks(body, [3], stall_warning_ms=100, stall_shutdown_ms=300)
