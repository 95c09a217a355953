"""Which values operations run with after a proposal of rank 0; random ones, all the time, are a part of stress.py."""

from typing import Any

import numpy as np
import pytest
from fabric import close_setup, make_setups
from ranks import Rank, on_ranks, run_ranks

from horo.core.context import Context
from horo.core.setup import KNOBS
from horo.errors import UsageError

SLOT = 1 << 16
FIRST = {"sockets": 1, "segment": 1 << 14, "cycle": 200, "overlap": 2}
TUNED: dict[str, Any] = {"segment_bytes": SLOT, "sockets_per_peer": 4, "tuned": FIRST}
"""Options of a group on several hosts whose values may change."""


@on_ranks([2, 1], **TUNED)
def test_final_values_are_those_of_all_ranks_and_of_process_sets(rank: Rank) -> None:
    """Of one that exists by then, and of one that is made later; both go on working."""
    last = {"segment": 4096, "piece": 8192, "sockets": 2, "fusion": 0, "doubling": 1024, "carried": 0}
    last |= {"cycle": 0, "overlap": 1}
    teams = [rank.add_team([1, 2])]

    def check() -> None:
        for team in teams if rank.rank > 0 else ():
            assert set(rank.allreduce(np.full(50_000, rank.rank, np.float32), "t", team=team)) == {3}

    values, is_final = rank.context.tuning()
    assert not is_final
    assert {knob: values[knob] for knob in FIRST} == FIRST
    check()
    if rank.rank == 0:
        rank.context.propose_tuning(dict(last, sockets=1))  # never in force: another follows before a batch
        rank.context.propose_tuning(last, is_final=True)
    rank.barrier()
    assert rank.context.tuning() == (last, True)
    teams.append(rank.add_team([1, 2]))
    for _ in range(5):
        check()
    rank.barrier()


@on_ranks([2])
def test_without_first_values_nothing_changes(rank: Rank) -> None:
    with pytest.raises(UsageError, match="by rank 0, in a job that has begun with some"):
        rank.context.propose_tuning(dict.fromkeys(KNOBS, 1))
    assert rank.context.tuning() == (dict.fromkeys(KNOBS, 0), False)


IMPOSSIBLE = [{"segment": 1 << 20}, {"segment": 5000}, {"sockets": 2}, {"overlap": 3}, {"carried": 1 << 15}]


@pytest.mark.parametrize("wrong", IMPOSSIBLE, ids=str)
def test_impossible_values_are_refused(wrong: dict[str, int]) -> None:
    (setup,) = make_setups([1], segment_bytes=SLOT, tuned=wrong)
    with pytest.raises(UsageError, match="values that this job cannot have"):
        Context(setup)
    close_setup(setup)

    def body(rank: Rank) -> None:
        before = rank.context.tuning()
        with pytest.raises(UsageError, match="none that this job can have" if rank.rank == 0 else "by rank 0"):
            rank.context.propose_tuning({**before[0], **wrong})
        rank.barrier()
        assert rank.context.tuning() == before

    run_ranks(body, [2], segment_bytes=SLOT, tuned={})
