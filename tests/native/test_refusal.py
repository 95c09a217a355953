"""A call that is refused on one rank: it fails on all that make it, with the reason."""

import re

import numpy as np
import pytest
from ranks import SUM, Group, Rank, on_ranks, recorded_stderr, wait_for

from horo.errors import DeadlockError, PeerLostError, StalledError, UnsupportedError, UsageError

LAYOUTS = [[1], [2], [3], [1, 1], [2, 2], [1, 2], [2, 1, 3], [1, 1, 1, 1]]


def call(rank: Rank, name: str, dtype: type = np.float32) -> np.ndarray:
    return rank.allreduce(np.ones(2, dtype), name, "adasum" if dtype is np.int32 else "sum")


def refused(rank: Rank, name: str, who: int) -> None:
    """A call that rank ``who`` has refused, by the sentence that all get."""
    with pytest.raises(UnsupportedError) as caught:
        call(rank, name, np.int32 if rank.rank == who else np.float32)
    reason = f"allreduce '{name}': this op is not offered for int32; Adasum is for floats"
    text = str(caught.value)
    assert text == reason if rank.rank == who else re.fullmatch(rf"rank {who} \(.+\) has refused it: {reason}", text)


@pytest.mark.parametrize("cache_capacity", [0, 2, 64])
@on_ranks(*LAYOUTS, "cache_capacity")
def test_all_get_the_reason_of_the_one_that_refuses_and_go_on(rank: Rank) -> None:
    for turn in range(3 * rank.size):
        refused(rank, "x", turn % rank.size)
        assert call(rank, "x").tolist() == [rank.size] * 2
        assert call(rank, f"y{turn % 5}").tolist() == [rank.size] * 2


@on_ranks([2], [3], [1, 1], [2, 1, 3])
def test_calls_of_one_name_keep_their_order(rank: Rank) -> None:
    """Rank 0 is two refused calls and a good one ahead before the others make the first."""
    if rank.rank > 0:
        rank.await_mark("ahead")
        refused(rank, "x", 0)
        refused(rank, "x", 0)
        assert call(rank, "x").tolist() == [rank.size] * 2
        return
    refused(rank, "x", 0)
    refused(rank, "x", 0)
    values = np.ones(2, np.float32)
    handle = rank.submit("allreduce", "x", [values], reduce_op=SUM)
    rank.mark("ahead")
    rank.finish(handle)
    assert values.tolist() == [rank.size] * 2


@on_ranks([2], [1, 1], [2, 1, 3], stall_warning_ms=100, stall_shutdown_ms=0)
def test_what_only_one_refuses_is_reported_and_the_job_goes_on(rank: Rank) -> None:
    """It is open to the end, which comes in order."""
    if rank.rank == rank.size - 1:
        with pytest.raises(UnsupportedError):
            call(rank, "odd", np.int32)
        with pytest.raises(UsageError, match="bytes"):
            call(rank, "n" * 5000)
    assert call(rank, "x").tolist() == [rank.size] * 2
    if rank.rank == 0:
        with recorded_stderr() as text:
            wait_for(lambda: "'odd'" in text())
            assert "nnn" not in text()
    rank.barrier("late")
    assert call(rank, "x").tolist() == [rank.size] * 2


@pytest.mark.parametrize("who", [[0], [1], [0, 1]], ids=str)
@on_ranks([3], [1, 1, 1], [2, 2], stall_warning_ms=100, stall_shutdown_ms=200)
def test_a_call_behind_a_refused_one_is_waited_for(rank: Rank, who: list[int]) -> None:
    """The others make neither: a stall is reported, and ends the job."""
    if rank.rank not in who:
        rank.await_mark(*who)
        return
    refused(rank, "x", rank.rank)
    rank.mark(("refused", rank.rank))
    rank.await_mark(*[("refused", other) for other in who])  # what is refused after the end has another error
    with pytest.raises(StalledError, match="has not submitted what others wait for"):
        call(rank, "x")
    rank.mark(rank.rank)


@pytest.mark.parametrize("who", ["first", "last"])
@on_ranks([2], [3], [1, 1], [2, 2], stall_warning_ms=50, stall_shutdown_ms=3000)
def test_what_nobody_waits_for_never_ends_the_job(rank: Rank, who: str) -> None:
    """More names than a report lists; the rank that is late with another one is named nevertheless."""
    if rank.rank == (0 if who == "first" else rank.size - 1):
        with recorded_stderr() as text:
            for number in range(7):
                refused(rank, f"odd{number}", rank.rank)
            rank.barrier("refused")
            wait_for(lambda: any(float(s) > 3.5 for s in re.findall(r"waiting for ([\d.]+) s for ranks", text())))
            rank.mark("is old")
    else:
        rank.barrier("refused")
        rank.await_mark("is old")
    assert call(rank, "x").tolist() == [rank.size] * 2
    late = 0 if who == "last" else rank.size - 1
    if rank.rank == late:
        wait_for(lambda: rank.context.health() is not None)
        assert str(rank.context.health()).startswith("this rank has not submitted what others wait for")
        return
    with pytest.raises(StalledError, match=rf"rank {late} \(host\d\) has not submitted what others wait for"):
        rank.barrier("late")  # longer than a busy machine holds up a rank


@on_ranks([2], [1, 1])
def test_a_call_behind_a_refused_one_may_be_part_of_a_deadlock(rank: Rank) -> None:
    rank.barrier("before")
    if rank.rank == 0:
        refused(rank, "x", 0)
    with pytest.raises(DeadlockError, match=r"rank 0 waits for 'x'.*, rank 1 for 'y'"):
        call(rank, "x" if rank.rank == 0 else "y")


@pytest.mark.parametrize("hosts", [[2], [1, 1]], ids=str)
def test_refusals_that_stand_behind_each_other_end_with_the_group(hosts: list[int]) -> None:
    """Whoever ends lets the next one of its name into the queue, where it must not stay."""
    with Group(hosts) as group:
        rank = Rank(group.contexts[0])
        for name in ("a", "a", "b"):
            rank.context.refuse(0, name, UsageError("it is refused here"))
        handle = rank.submit("allreduce", "b", [np.ones(2, np.float32)], reduce_op=SUM)
        group.kill(1)
        with pytest.raises(PeerLostError):
            rank.finish(handle)
