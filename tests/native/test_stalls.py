"""What is said of ranks that have not submitted what others wait for, and the end of a job because of it."""

import os
import re
import socket

import numpy as np
import pytest
from fabric import make_team_links
from ranks import Rank, Written, on_ranks, recorded_stderr, run_ranks, wait_for

from horo.errors import StalledError


@on_ranks([3], stall_warning_ms=100)
def test_a_rank_that_waits_in_two_process_sets_calls_the_leaders_of_both(rank: Rank, written: Written) -> None:
    """Leaders that wait for nothing, under one name: the report of one set does not stand for the other's."""
    reports = [
        re.compile(r"horo \[0\] warning: .*:\n  ranks 0, 1 \(host0\) have not submitted 'late'"),
        re.compile(r"horo \[1\] warning: .*:\n  rank 1 \(host0\) has not submitted 'late'"),
    ]
    team = rank.context.add_team([1, 2])
    handles = []
    if rank.rank == 2:
        handles.append(rank.submit("barrier", "late", []))
        wait_for(lambda: reports[0].search(written()) is not None)  # rank 1 has gone to sleep by then
        handles.append(rank.submit("barrier", "late", [], team=team))
    else:
        wait_for(lambda: all(report.search(written()) is not None for report in reports))
        rank.barrier("late")
        if rank.rank == 1:
            rank.barrier("late", team=team)
    rank.finish(*handles)


@on_ranks([2], stall_warning_ms=50, stall_shutdown_ms=200)
def test_a_stall_ends_the_job_if_so_configured(rank: Rank) -> None:
    if rank.rank == 1:
        wait_for(lambda: rank.context.health() is not None)
        assert str(rank.context.health()).startswith("this rank has not submitted what others wait for")
        return
    with pytest.raises(StalledError, match=r"rank 1 \(host0\) has not submitted what others wait for"):
        rank.barrier()


@pytest.mark.parametrize(
    ("hosts", "zero", "one"),
    [
        ([2], "rank 0 (host0) has submitted", "rank 1 (host0) has submitted"),
        ([3], "ranks 0, 2 (host0) have submitted", "rank 1 (host0) has submitted"),
        ([1, 1], "rank 0 (host0) has submitted", "the ranks led by rank 1 (host1) have all submitted"),
    ],
    ids=str,
)
@on_ranks("hosts", stall_warning_ms=300)
def test_a_stall_report_says_of_each_rank_what_it_has_submitted(
    rank: Rank, zero: str, one: str, written: Written
) -> None:
    lines = {f"{zero} 'x' and not 'y'", f"{one} 'y' and not 'x'"}
    own, other = ("y", "x") if rank.rank == 1 else ("x", "y")
    handle = rank.submit("barrier", own, [])
    if rank.rank == 0:
        wait_for(lambda: lines <= {each.strip() for each in written().splitlines()})
        rank.mark("reported")
    rank.await_mark("reported")
    rank.barrier(other)
    rank.finish(handle)


def test_who_is_waited_for_in_the_middle_in_a_process_set_is_named_by_its_rank() -> None:
    """Data links of the set lead nowhere, so that its two members wait for each other."""
    links = make_team_links([0, 1, 2], [1, 2])
    nowhere = [socket.socketpair() for _ in links]
    for (end, _), (rank, fds) in zip(nowhere, links.items(), strict=True):
        os.dup2(end.fileno(), fds["data_fds"][2 - rank], inheritable=False)

    def body(rank: Rank) -> None:
        team = rank.context.add_team([1, 2], **links.get(rank.rank, {}))
        if rank.rank == 0:
            wait_for(lambda: rank.context.health() is not None)
            return
        with pytest.raises(StalledError):
            rank.allreduce(np.ones(100_000), team=team)

    with recorded_stderr() as written:
        run_ranks(body, [1, 1, 1], stall_warning_ms=100, stall_shutdown_ms=2000)
        text = written()
    for ends in nowhere:
        for end in ends:
            end.close()
    late = set(re.findall(r"waiting in process set 1 \(ranks 1, 2\) for (.*) in the middle of an operation", text))
    assert late == {"rank 1 (host1)", "rank 2 (host2)"}, text


@on_ranks([3], [1, 2], stall_warning_ms=100)
def test_a_send_or_receive_that_waits_is_reported_with_its_other_rank(
    rank: Rank, hosts: list[int], written: Written
) -> None:
    who = f"rank 1 (host{len(hosts) - 1}) has not called"
    expected = [f"{who} send to rank 0, tag 7", f"{who} receive from rank 0, tag 8"]
    expected.append("no rank has called send to rank 0, tag 9")
    arrays = [np.zeros(9) for _ in range(3)]
    if rank.rank == 0:
        rank.finish(rank.receive(arrays[0], 1, 7), rank.send(arrays[1], 1, 8), rank.receive(arrays[2], None, 9))
    elif rank.rank == 1:
        wait_for(lambda: all(f"\n  {line}" in written() for line in expected))
        rank.finish(rank.send(arrays[0], 0, 7), rank.receive(arrays[1], 0, 8), rank.send(arrays[2], 0, 9))
