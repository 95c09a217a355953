"""Waiting in a join never ends the job by itself: the others may have more to do, in any team, or without anybody."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from ranks import Rank, recorded_stderr, run_ranks

from horo import _core
from horo.errors import StalledError

SUM = _core.REDUCE_OPS["sum"]
WARNING_MS, SHUTDOWN_MS = 400, 1500


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def work(rank: Rank, how: str, team: int) -> None:
    """What ranks that have not joined do for longer than ``SHUTDOWN_MS``."""
    if how == "nothing":
        pause(2.5)
        return
    end = time.monotonic() + 2.5
    is_over = False
    while not is_over:  # all of them stop after the same step
        mine = [np.array([time.monotonic() > end], np.int32)]
        rank.finish(rank.submit("allreduce", "x", mine, reduce_op=SUM, team=team))
        is_over = bool(mine[0][0])
        pause(0.02)


@pytest.mark.parametrize(
    ("hosts", "how"),
    [
        ([3], "nothing"),
        ([3], "in the world"),
        ([3], "in a team"),
        ([2, 1], "nothing"),
        ([2, 1], "in the world"),
        ([1, 2], "in a team"),
    ],
    ids=str,
)
def test_a_join_waits_as_long_as_the_others_need(hosts: list[int], how: str) -> None:
    """A team in which nothing happens is joined, too; or only a team works, which the joined rank does not see."""
    members = [1, 2] if how == "in a team" else [0, 1]

    def body(rank: Rank) -> None:
        team = rank.context.add_team(members)
        if rank.rank != 0:
            work(rank, how, team if how == "in a team" else 0)
        handles = [rank.context.start_join(joined) for joined in [0, team] if joined == 0 or rank.rank in members]
        for handle in handles:
            rank.context.wait(handle)
            rank.context.release(handle)

    run_ranks(body, hosts, stall_warning_ms=WARNING_MS, stall_shutdown_ms=SHUTDOWN_MS)


def test_an_idle_team_is_not_reported_while_another_works() -> None:
    def body(rank: Rank) -> None:
        team = rank.context.add_team([0, 1])
        if rank.rank != 0:
            work(rank, "in the world", 0)
        handles = [rank.context.start_join(joined) for joined in [0, team] if joined == 0 or rank.rank < 2]
        for handle in handles:
            rank.context.wait(handle)
            rank.context.release(handle)

    with recorded_stderr() as written:
        run_ranks(body, [3], stall_warning_ms=1500)
        assert "waiting" not in written()


def test_what_waits_beside_a_join_ends_the_job_as_ever() -> None:
    """Rank 0 has joined, rank 1 waits for rank 2, which does nothing."""
    has_ended = threading.Event()

    def body(rank: Rank) -> None:
        if rank.rank == 2:
            assert has_ended.wait(30)
            return
        with pytest.raises(StalledError, match=r"rank 2"):
            if rank.rank == 0:
                rank.context.wait(rank.context.start_join(0))
            else:
                rank.allreduce(np.ones(3), "x")
        has_ended.set()

    run_ranks(body, [3], stall_warning_ms=100, stall_shutdown_ms=300)
