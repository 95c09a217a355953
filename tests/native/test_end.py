"""A rank whose program ends with an error ends the group, and the others read its words."""

from __future__ import annotations

import re

import numpy as np
import pytest
from ranks import Group, Rank, on_ranks, run_ranks, wait_for

from horo.errors import AbortedError, HoroError, PeerLostError

WORDS = "ValueError: bad sample in shard 7"
ENDS = [(hosts, ender) for hosts in ([2], [2, 2], [1, 1, 1]) for ender in range(sum(hosts))]


def fails(rank: Rank, name: str) -> str:
    """What a collective of the rank fails with."""
    try:
        rank.allreduce(np.ones(3), name)
    except HoroError as error:
        assert type(error) is PeerLostError
        return str(error)
    raise AssertionError("it must fail")


@pytest.mark.parametrize(("hosts", "ender"), ENDS, ids=str)
@on_ranks("hosts", log_level=5)
def test_all_others_read_the_words_while_they_wait_and_afterwards(rank: Rank, ender: int) -> None:
    rank.allreduce(np.ones(3), "first")
    if rank.rank == ender:
        rank.context.end(WORDS)
        assert fails(rank, "own").startswith(f"this rank ended with {WORDS}")
        return
    expected = rf"rank {ender} \(host\d\) ended with {WORDS}"
    assert re.match(expected, fails(rank, "second"))
    assert re.match(expected, fails(rank, "third"))
    assert re.fullmatch(expected, str(rank.context.health()))


@pytest.mark.parametrize("hosts", [[4], [2, 2], [1, 1, 1]], ids=str)
def test_what_one_rank_has_finished_is_finished_by_all_when_it_ends(hosts: list[int]) -> None:
    """All have agreed on it, and it stands in the log in front of the end: nobody gets an error for it."""
    size = sum(hosts)

    def body(rank: Rank) -> None:
        for step in range(3):
            assert (rank.allreduce(np.full(5000, rank.rank + 1.0), f"x{step}") == size * (size + 1) / 2).all()
        rank.barrier("last")
        rank.context.end("SystemExit: 75")
        health = str(rank.context.health())
        assert re.fullmatch(r"(this rank|rank \d \(host\d\)) ended with SystemExit: 75", health)

    for _ in range(20):
        with Group(hosts, log_level=5) as group:
            group.run(body)


@on_ranks([2], [1, 1], log_level=5)
def test_a_rank_that_waits_is_told_what_the_other_has_done_and_in_which_step_it_is_itself(rank: Rank) -> None:
    rank.barrier("start")
    if rank.rank == 1:
        rank.context.end("came to the end of its script after 30 steps", has_failed=False)
        return
    told = r"rank 1 \(host\d\) came to the end of its script after 30 steps, "
    rank.context.step[0] = 31
    with pytest.raises(AbortedError, match=told + "while rank 0 is in step 31: uneven data or an early stop; use "):
        rank.barrier("gradient")
    rank.context.step[0] = 0
    with pytest.raises(AbortedError, match=told + "without a call that others wait for$"):
        rank.barrier("metric")
    assert rank.context.events()[-1].event == "left"


def test_the_names_of_what_is_pending_are_cut_and_never_the_words_in_front_of_them() -> None:
    words = "x" * 800 + "; use the remedy"

    def body(rank: Rank) -> None:
        if rank.rank == 1:
            wait_for(lambda: group.contexts[0].counters()["requests"] > 0)
            rank.context.end(words)
            return
        with pytest.raises(PeerLostError) as error:
            rank.barrier("y" * 500)
        assert f"{words}; pending here: 'yyy" in str(error.value)

    with Group([2]) as group:
        group.run(body)


def test_long_words_are_cut_and_bytes_that_are_none_are_replaced() -> None:
    def body(rank: Rank) -> str:
        if rank.rank == 0:
            rank.context.end("x\0" + "\u00e4" * 600)
        wait_for(lambda: rank.context.health() is not None)
        return str(rank.context.health())

    with Group([1, 1]) as group:
        own, other = group.run(body)
    assert own == "this rank ended with x " + "\u00e4" * 446 + "\ufffd"
    assert other == "rank 0 (host0) ended with x " + "\u00e4" * 446 + "\ufffd"


def test_the_first_death_stays_the_cause() -> None:
    """Also where the dead themselves lose the others, and write that into memory that all have."""
    with Group([3]) as group:
        group.run(lambda rank: rank.barrier())
        for victim in (1, 2):
            group.kill(victim)
            group.leave(victim)
            assert str(group.contexts[0].health()).startswith("rank 1 (host0) is gone")


@pytest.mark.parametrize(("hosts", "ender"), [([1, 1], 1), ([1, 1], 0), ([2, 2], 2), ([2], 1)], ids=str)
def test_the_words_arrive_also_where_the_rank_leaves_right_after(hosts: list[int], ender: int) -> None:
    for _ in range(30):
        with Group(hosts, log_level=5) as group:

            def body(rank: Rank, group: Group = group) -> None:
                if rank.rank == ender:
                    rank.context.end(WORDS)
                    group.leave(ender)
                    return
                wait_for(lambda: rank.context.health() is not None)
                assert WORDS in str(rank.context.health())

            group.run(body)


def test_the_flight_recorder_is_not_shown_for_an_end_that_is_explained(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: Rank) -> None:
        if rank.rank == 0:
            rank.context.end(WORDS)
        fails(rank, "x")
        assert rank.context.events()[-1].event == "lost"

    run_ranks(body, [2])
    assert "last events" not in capfd.readouterr().err
