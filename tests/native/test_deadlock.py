"""Ranks that wait for one another: all are told, whatever the layout, and no rank that may go on is taken for one."""

import re
import threading

import numpy as np
import pytest
from ranks import Rank, Written, on_ranks, wait_for

from horo.core import context as _core
from horo.errors import DeadlockError

LAYOUTS = [[2], [3], [1, 1], [2, 2], [1, 1, 1], [1, 2, 1, 1]]


class Watch:
    """Counts how often each rank has told its core what its threads wait for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reports: dict[int, int] = {}
        report = _core.Context._report_blocked

        def counted(context: _core.Context) -> None:
            report(context)
            self.reports[context.rank] = self.reports.get(context.rank, 0) + 1

        monkeypatch.setattr(_core.Context, "_report_blocked", counted)

    def await_more(self, rank: int, count: int) -> None:
        """Until so many more reports of a rank."""
        wanted = self.reports.get(rank, 0) + count
        wait_for(lambda: self.reports.get(rank, 0) >= wanted, timeout_s=60)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


@on_ranks(*LAYOUTS)
def test_all_ranks_are_told_who_waits_for_what(rank: Rank) -> None:
    rank.barrier("before")
    with pytest.raises(DeadlockError) as error:
        rank.allreduce(np.ones(3), "late" if rank.rank == 1 else "early")
    with pytest.raises(DeadlockError):
        rank.barrier("after")
    place = r"\(ranks\.py:\d+\)"
    size, text = rank.size, str(error.value)
    early = "rank 0 waits" if size == 2 else rf"ranks 0, 2{'' if size == 3 else f'-{size - 1}'} wait"
    question = r"has a rank fewer batches, or has it skipped a backward\(\) or step\(\)\?"
    assert re.fullmatch(rf"{early} for 'early' {place}, rank 1 for 'late' {place}; {question}", text), text
    assert rank.is_common("text", text)


@on_ranks([2], [1, 1])
def test_ranks_that_wait_in_different_teams_are_told(rank: Rank) -> None:
    teams = [rank.add_team([0, 1]) for _ in range(2)]
    told = r"rank 0 waits for 'same' in process set 1 \(ranks 0, 1\) .*, rank 1 for 'same' in process set 2"
    with pytest.raises(DeadlockError, match=told):
        rank.barrier("same", team=teams[rank.rank])


@on_ranks([2], [2, 2], [1, 1, 1])
def test_a_rank_that_computes_is_waited_for(rank: Rank, watch: Watch) -> None:
    rank.barrier("before")
    if rank.rank == 1:
        watch.await_more(0, 5)
    rank.barrier("other")


@on_ranks([2])
def test_a_rank_whose_request_is_not_waited_for_is_waited_for(rank: Rank, watch: Watch) -> None:
    """It has submitted something else and computes; then it waits, and both can go on."""
    if rank.rank == 1:
        handle = rank.submit("barrier", "b", [])
        watch.await_more(0, 4)
        rank.barrier("a")
        rank.finish(handle)
        return
    rank.barrier("a")
    rank.barrier("b")


@on_ranks([2], [1, 1], stall_warning_ms=1000)
def test_a_thread_that_may_still_submit_makes_it_a_warning(rank: Rank, written: Written) -> None:
    said = r"rank 0 waits for 'a' .*, rank 1 for 'b' .*; only thread 'Later' of rank 0 may still submit"
    if rank.rank == 1:
        rank.barrier("first")
        rank.barrier("b")
        rank.barrier("a")
        return

    def later() -> None:
        rank.barrier("first")
        rank.mark("is known")
        wait_for(lambda: re.search(said, written()) is not None, 60)
        rank.barrier("b")

    thread = threading.Thread(target=later, name="Later")
    thread.start()
    rank.await_mark("is known")  # else nobody can know that it is to come
    rank.finish(rank.submit("barrier", "a", []))
    thread.join()


@on_ranks([2], [1, 1], stall_warning_ms=500)
def test_ranks_that_only_poll_are_named_by_the_check_for_stalls(rank: Rank, written: Written) -> None:
    """What a thread does between two polls, nobody can know: it may submit what is missing, as it does here."""

    def is_named() -> bool:
        return "waiting for" in (text := written()) and "'a'" in text

    first, second = ("a", "b") if rank.rank == 0 else ("b", "a")
    handle = rank.submit("barrier", first, [])
    wait_for(lambda: rank.context.poll(handle) or is_named(), 60)
    rank.barrier(second)
    rank.finish(handle)
    assert "nothing can finish" not in written()


@on_ranks([2], [1, 1])
def test_a_team_that_comes_between_two_reports_hides_no_deadlock(rank: Rank, watch: Watch) -> None:
    errors: list[str] = []
    rank.barrier("before")  # so this thread is known to use horo

    def wait_early() -> None:
        with pytest.raises(DeadlockError) as error:
            rank.barrier(f"early {rank.rank}")
        errors.append(str(error.value))

    thread = threading.Thread(target=wait_early)
    thread.start()
    watch.await_more(rank.rank, 1 + rank.rank)  # the team is there when one rank has reported again, or neither
    team = rank.add_team([0, 1])
    with pytest.raises(DeadlockError):
        rank.barrier(f"late {rank.rank}", team=team)
    thread.join()
    assert rank.is_common("text", errors[0])
    for r in range(2):
        assert f"'early {r}' (" in errors[0]
        assert f"'late {r}' in process set 1 (ranks 0, 1) (" in errors[0]


@pytest.mark.parametrize("call", ["receive", "send", "barrier"])
@on_ranks([2], [3], [1, 1])
def test_sends_and_receives_that_never_meet_are_told(rank: Rank, call: str) -> None:
    peer, array = (rank.rank + 1) % rank.size, np.ones(10_000)
    rank.finish(rank.send(array, peer, 4), rank.receive(np.zeros(10_000), None, 4))
    with pytest.raises(DeadlockError) as error:
        if call == "barrier" and rank.rank == 0:
            rank.barrier("all")
        else:
            rank.finish(rank.send(array, peer) if call == "send" else rank.receive(array, peer))
    text = str(error.value)
    assert rank.is_common("text", text)
    advice = {"send": "let one rank receive first", "receive": "does one of the ranks send first"}
    assert advice.get(call, "has a rank fewer batches") in text
    verb = {"send": "send to"}.get(call, "receive from")
    for r in range(rank.size):
        waited = "all" if call == "barrier" and r == 0 else f"{verb} rank {(r + 1) % rank.size}, tag 0"
        assert re.search(rf"rank {r}( waits)? for '{waited}' \(\w+\.py:\d+\)", text), text


@on_ranks([2], [1, 1])
def test_a_send_that_comes_late_is_waited_for(rank: Rank, watch: Watch) -> None:
    array = np.ones(3)
    if rank.rank == 1:
        watch.await_more(0, 5)
        rank.finish(rank.send(array, 0), rank.receive(array, 0))
    else:
        rank.finish(rank.receive(array, 1), rank.send(array, 1))
