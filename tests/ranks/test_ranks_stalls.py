"""A rank that is stopped: others say for whom they wait, go on when it does, and give up where they are told to."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from jobs import wait_until
from plain_ranks import PlainRanks

WARN = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5"}
GIVE_UP_S = 4
"""No rank is held up for so long because the machine is busy: it would be named beside the one that is stopped."""
GIVE_UP = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(GIVE_UP_S)}

everywhere = pytest.mark.parametrize(("hosts", "victim"), [("aa", 0), ("aa", 1), ("ab", 0), ("aabb", 1)])


def logs_of_others(ranks: PlainRanks, victim: int) -> str:
    return "".join(ranks.log(rank) for rank in range(len(ranks.hosts)) if rank != victim)


@everywhere
def test_a_stopped_rank_is_named_with_what_it_has_not_submitted_and_may_go_on(
    tmp_path: Path, hosts: str, victim: int
) -> None:
    with PlainRanks(tmp_path, hosts, WARN) as ranks:
        ranks.all("start")
        ranks.all("allreduce", "x")
        ranks.kill(victim, signal.SIGSTOP)
        for rank in range(len(hosts)):
            ranks.tell(rank, "allreduce", "x")
        # The one that is stopped may also be the only one that could tell who is missing.
        name = rf"rank {victim} \(host-{hosts[victim]}\)"
        warning = re.compile(rf"{name} has not submitted 'x'|'x' \(no answer from {name}\)")
        wait_until(lambda: warning.search(logs_of_others(ranks, victim)), f"{warning} in the log of another rank")
        ranks.kill(victim, signal.SIGCONT)
        total = float(sum(range(len(hosts) + 1)))
        assert [ranks.value(rank) for rank in range(len(hosts))] == [[total, total]] * len(hosts)
        ranks.all("close")
        assert set(ranks.finish()) == {0}


@everywhere
def test_ranks_give_up_a_stopped_one_where_they_are_told_to(tmp_path: Path, hosts: str, victim: int) -> None:
    with PlainRanks(tmp_path, hosts, GIVE_UP) as ranks:
        ranks.all("start")
        ranks.all("allreduce", "x")
        ranks.kill(victim, signal.SIGSTOP)
        told = [rank for rank in range(len(hosts)) if rank != victim]
        for rank in told:
            ranks.tell(rank, "allreduce", "x")
        for rank in told:
            answer = ranks.answer(rank)
            assert (answer.get("error"), answer.get("lost")) == ("StalledError", True), f"rank {rank}: {answer}"
            assert answer["text"].startswith(f"rank {victim} (host-{hosts[victim]}) has not submitted what others"), (
                answer
            )
            assert answer["text"].endswith("; pending here: 'x'"), answer


@everywhere
def test_a_rank_that_is_waited_for_says_where_it_stands(tmp_path: Path, hosts: str, victim: int) -> None:
    with PlainRanks(tmp_path, hosts, WARN) as ranks:
        ranks.all("start")
        ranks.all("allreduce", "x")
        for rank in range(len(hosts)):
            if rank != victim:
                ranks.tell(rank, "allreduce", "x")
        heading = (
            rf"horo \[{victim}\] warning: another rank waits for this one, which stands here:\nthread 'MainThread':"
        )
        stack = re.compile(rf"{heading}(.|\n)*plain_rank\.py\", line \d+, in main\n +for line in sys\.stdin:")
        wait_until(lambda: stack.search(ranks.log(victim)), f"{stack} in its log")
        ranks.tell(victim, "allreduce", "x")
        total = float(sum(range(len(hosts) + 1)))
        assert [ranks.value(rank) for rank in range(len(hosts))] == [[total, total]] * len(hosts)
        ranks.all("close")
        assert set(ranks.finish()) == {0}


@pytest.mark.parametrize(("hosts", "victim"), [("aaa", 1), ("aab", 2), ("abc", 1)])
def test_beside_a_join_only_the_rank_that_is_late_says_where_it_stands(tmp_path: Path, hosts: str, victim: int) -> None:
    """One has joined, one waits for what the last has not submitted: it has not joined either, but is not to blame."""
    joined, waits = (rank for rank in range(3) if rank != victim)
    with PlainRanks(tmp_path, hosts, WARN) as ranks:
        ranks.all("start")
        ranks.all("allreduce", "x")
        ranks.tell(joined, "join")
        ranks.tell(waits, "allreduce", "x")
        heading = "another rank waits for this one, which stands here"
        wait_until(lambda: heading in ranks.log(victim), f"{heading!r} in its log")
        ranks.tell(victim, "allreduce", "x")
        total = float(waits + victim + 2)
        assert [ranks.value(rank) for rank in sorted((waits, victim))] == [[total, total]] * 2
        ranks.tell(waits, "join")
        ranks.tell(victim, "join")
        assert len({ranks.value(rank) for rank in range(3)}) == 1
        ranks.all("close")
        assert set(ranks.finish()) == {0}
        assert [rank for rank in range(3) if heading in ranks.log(rank)] == [victim]


@pytest.mark.parametrize(("hosts", "victim"), [("aa", 1), ("abb", 1)])
def test_a_rank_whose_interpreter_is_busy_does_not_answer(tmp_path: Path, hosts: str, victim: int) -> None:
    with PlainRanks(tmp_path, hosts, WARN) as ranks:
        ranks.all("start")
        ranks.all("allreduce", "x")
        fifo = tmp_path / "go on"
        os.mkfifo(fifo)
        ranks.tell(victim, "keep_interpreter", str(fifo))
        for rank in range(len(hosts)):
            if rank != victim:
                ranks.tell(rank, "allreduce", "x")
        said = f"rank {victim} (host-{hosts[victim]}) does not answer where it stands: its Python interpreter is busy"
        wait_until(lambda: any(said in ranks.log(rank) for rank in range(len(hosts))), f"{said!r} in a log")
        fifo.write_bytes(b"x")
        assert ranks.value(victim) is None
        ranks.tell(victim, "allreduce", "x")
        for rank in range(len(hosts)):
            ranks.value(rank)
        ranks.all("close")
        assert set(ranks.finish()) == {0}


def test_all_that_wait_show_what_they_did_last_at_a_stall_and_at_a_loss(tmp_path: Path) -> None:
    with PlainRanks(tmp_path, "aab", WARN) as ranks:
        ranks.all("start")
        ranks.all("allreduce", "done")
        ranks.kill(1, signal.SIGSTOP)
        for rank in (0, 2):
            ranks.tell(rank, "allreduce", "late")
        ago = r"\n *\d+\.\d{3} s ago  "
        last = rf"finished   allreduce 'done', 3\.9 KiB{ago}submitted  allreduce 'late', 3\.9 KiB"
        for rank in (0, 2):
            pattern = rf"horo \[{rank}\] warning: the last events on this rank(.|\n)*{last}\n"
            wait_until(lambda p=pattern, r=rank: re.search(p, ranks.log(r)), f"{pattern} in the log of rank {rank}")
        ranks.kill(1)
        for rank in (0, 2):
            assert ranks.answer(rank)["error"] == "PeerLostError"
            end = rf"{last}{ago}the group ended: peer lost, rank 1\n"
            block = rf"horo \[{rank}\] error: the last events on this rank(.|\n)*{end}"
            assert re.search(block, ranks.log(rank)), ranks.log(rank)
