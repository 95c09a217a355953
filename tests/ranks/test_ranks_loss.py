"""A rank that dies is, on every other rank and whatever that does, an error that names it; nothing hangs."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from jobs import Hororun
from plain_ranks import PlainRanks

LARGE = 4 << 20
"""Numbers in a tensor that takes long enough to be killed in the middle of it."""
WHERE = [("aa", 1), ("aaa", 0), ("aabb", 0), ("aabb", 3)]
"""Hosts of the ranks and the rank that dies: a leader, another, on the first and on the second host."""
WAYS = (
    r"rank {rank} \(host-{host}\) is gone: "
    r"(its process ended without shutting horo down|the connection to it was closed, seen from rank \d \(host-[ab]\))"
)

PENDING = "; pending here: 'x'"
REFUSED = f"({PENDING})?"
"""Whoever submits when it is known already has nothing pending."""

everywhere = pytest.mark.parametrize(("hosts", "victim"), WHERE)


def check_lost(ranks: PlainRanks, told: Sequence[int], victim: int, pending: str) -> None:
    """Every rank told to do something answers that the victim is gone, and ``pending`` (a pattern)."""
    for rank in told:
        answer = ranks.answer(rank)
        while answer == {"value": "going"}:
            answer = ranks.answer(rank)
        assert (answer.get("error"), answer.get("lost")) == ("PeerLostError", True), f"rank {rank}: {answer}"
        ways = WAYS.format(rank=victim, host=ranks.hosts[victim])
        assert re.search(rf"^{ways}{pending}$", answer["text"]), f"rank {rank}: {answer}"


def others(ranks: PlainRanks, victim: int) -> list[int]:
    return [rank for rank in range(len(ranks.hosts)) if rank != victim]


@everywhere
def test_waiting_ranks_get_the_error(tmp_path: Path, hosts: str, victim: int) -> None:
    with PlainRanks(tmp_path, hosts) as ranks:
        ranks.all("start")
        told = others(ranks, victim)
        ranks.all("submit", "x", ranks=told)
        for rank in told:
            ranks.tell(rank, "wait", "x")
        ranks.kill(victim)
        check_lost(ranks, told, victim, PENDING)
        for rank in told:
            ranks.tell(rank, "allreduce", "x")
        check_lost(ranks, told, victim, "")
        ranks.all("close", ranks=told)
        assert ranks.finish() == [-signal.SIGKILL if rank == victim else 0 for rank in range(len(hosts))]


@everywhere
def test_ranks_in_the_middle_of_large_transfers_get_the_error(tmp_path: Path, hosts: str, victim: int) -> None:
    with PlainRanks(tmp_path, hosts) as ranks:
        ranks.all("start")
        assert set(ranks.all("repeat", "x", LARGE, 1000)) == {"going"}
        ranks.kill(victim)
        check_lost(ranks, others(ranks, victim), victim, REFUSED)


@pytest.mark.parametrize(("hosts", "victim", "follower"), [("aab", 1, 0), ("aabb", 0, 1), ("aabb", 1, 0)])
def test_ranks_that_end_at_their_error_are_not_taken_for_its_cause(
    tmp_path: Path, hosts: str, victim: int, follower: int
) -> None:
    with PlainRanks(tmp_path, hosts) as ranks:
        ranks.all("start")
        ranks.all("be_hasty")
        ranks.all("repeat", "x", LARGE, 1000)
        for rank in range(2, len(hosts)):
            ranks.kill(rank, signal.SIGSTOP)
        ranks.kill(victim)
        ranks.processes[follower].wait()
        for rank in reversed(range(2, len(hosts))):  # by now all links to the first host have ended
            ranks.kill(rank, signal.SIGCONT)
        check_lost(ranks, others(ranks, victim), victim, REFUSED)


@everywhere
@pytest.mark.parametrize("end", ["close", "exit"])
def test_a_rank_that_comes_last_names_the_first_that_died_and_not_of_those_that_left_for_it(
    tmp_path: Path, hosts: str, victim: int, end: str
) -> None:
    with PlainRanks(tmp_path, hosts) as ranks:
        ranks.all("start")
        ranks.all("allreduce", "before")
        ranks.kill(victim)
        ranks.processes[victim].wait()
        for rank in others(ranks, victim):
            ranks.tell(rank, "allreduce", "x")
            check_lost(ranks, [rank], victim, REFUSED)
            ranks.tell(rank, *{"close": ["close"], "exit": ["exit", 3]}[end])
            if end == "close":
                ranks.value(rank)
            else:
                ranks.processes[rank].wait()


@pytest.mark.parametrize(
    ("where", "name"),
    [("Rendezvous", "publish"), ("module", "join_arena"), ("module", "connect_hosts"), ("Rendezvous", "finish")],
)
@pytest.mark.parametrize(("hosts", "victim"), [("aaa", 2), ("aabb", 0)])
def test_ranks_inside_init_get_the_error(tmp_path: Path, hosts: str, victim: int, where: str, name: str) -> None:
    with PlainRanks(tmp_path, hosts) as ranks:
        told = others(ranks, victim)
        for rank in told:
            ranks.tell(rank, "start")
        ranks.tell(victim, "start_and_die_in", where, name)
        for rank in told:
            answer = ranks.answer(rank)
            assert (answer.get("error"), answer.get("lost")) == ("PeerLostError", True), f"rank {rank}: {answer}"
            assert f"rank {victim} (host-{hosts[victim]}) died while init() was running" in answer["text"]
        assert ranks.finish() == [-signal.SIGKILL if rank == victim else 0 for rank in range(len(hosts))]


def test_a_rank_that_dies_right_after_init_is_an_error_of_the_first_call(tmp_path: Path) -> None:
    with PlainRanks(tmp_path, "aab") as ranks:
        told = [0, 2]
        for rank in told:
            ranks.tell(rank, "start")
        ranks.tell(1, "start_and_die_in", "module", "RunningRank")
        ranks.processes[1].wait()
        assert [ranks.value(rank) for rank in told] == [[0, 3], [2, 3]]
        for rank in told:
            ranks.tell(rank, "allreduce", "x")
        check_lost(ranks, told, 1, REFUSED)


LEAVES_EARLY = """
import os
from horo.bootstrap import job
if os.environ["HOROVOD_RANK"] == "0":
    job.start()
"""


def test_ranks_of_different_versions_are_told_both(tmp_path: Path) -> None:
    with PlainRanks(tmp_path, "ab") as ranks:
        ranks.tell(0, "start", "1.0+abi1")
        ranks.tell(1, "start", "2.0+abi2")
        for rank in (0, 1):
            answer = ranks.answer(rank)
            assert answer.get("error") == "MismatchError", answer
            assert "core 1.0+abi1" in answer["text"]
            assert "core 2.0+abi2" in answer["text"]
            assert "install the same version on all hosts" in answer["text"]
        assert ranks.finish() == [0, 0]


def test_a_script_that_ends_before_init_on_one_rank_is_named_by_the_others() -> None:
    hororun = Hororun()
    try:
        words = [sys.executable, "-c", LEAVES_EARLY]
        done = hororun.run("-np", "2", *words, environment={"HORO_START_TIMEOUT": "1000"})
    finally:
        hororun.clean_up()
    assert done.returncode == 1
    assert "rank 1 (localhost) exited with code 0 before it called init()" in done.stderr
    assert "hororun: rank 0 on localhost ended with PeerLostError: init() was given up" in done.stderr
