"""A rank whose program ends with an error ends the group, and the others read its words."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest
from ranks import Group, Rank, wait_for

from horo import _core
from horo.errors import HoroError, PeerLostError

SUM = _core.REDUCE_OPS["sum"]
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
def test_all_others_read_the_words_while_they_wait_and_afterwards(hosts: list[int], ender: int) -> None:
    finished = threading.Barrier(sum(hosts))

    def body(rank: Rank) -> None:
        rank.allreduce(np.ones(3), "first")
        finished.wait(20)  # the end is heard at once, also by those that have not finished
        if rank.rank == ender:
            rank.context.end(WORDS)
            assert fails(rank, "own").startswith(f"this rank ended with {WORDS}")
            return
        expected = rf"rank {ender} \(host\d\) ended with {WORDS}"
        assert re.match(expected, fails(rank, "second"))
        assert re.match(expected, fails(rank, "third"))
        assert re.fullmatch(expected, str(rank.context.health()))

    with Group(hosts, log_level=5) as group:
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


@pytest.mark.parametrize("hosts", [[2], [1, 1]], ids=str)
def test_only_the_first_end_counts(hosts: list[int]) -> None:
    def body(rank: Rank) -> str:
        if rank.rank == 0:
            rank.context.end("first")
        wait_for(lambda: rank.context.health() is not None)
        rank.context.end("second")
        return str(rank.context.health())

    with Group(hosts) as group:
        assert [text.partition(" ended ")[2] for text in group.run(body)] == ["with first", "with first"]


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

    with Group([2]) as group:
        group.run(body)
    assert "last events" not in capfd.readouterr().err
