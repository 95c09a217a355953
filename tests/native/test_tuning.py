"""What operations run with, changed while they run: ranks as threads, on one host and on several.

Rank 0 proposes other values all the time here, so every operation has other segments, pieces, sockets, algorithms and
batches than the one before. What ranks get must be right, and equal to the bit, whatever they have run with.
"""

import random
from typing import Any

import native_build
import numpy as np
import pytest
from fabric import close_setup, make_setups, make_team_links
from known_answers import Proposals
from ranks import Rank, run_ranks

from horo.core.context import Context
from horo.core.setup import KNOBS
from horo.errors import UsageError

STEPS = 20 if native_build.FLAVOUR else 30
SLOT = 1 << 16
SEED = random.SystemRandom().getrandbits(31) | 1
FIRST = {"sockets": 1, "segment": 1 << 14, "cycle": 200, "overlap": 2}
TUNED: dict[str, Any] = {"segment_bytes": SLOT, "sockets_per_peer": 4, "tuned": FIRST}
"""Options of a group on several hosts whose values may change."""


@pytest.mark.parametrize("hosts", [[1, 1], [2, 2], [1, 1, 1]], ids=str)
def test_all_ranks_hold_the_same_bits(hosts: list[int]) -> None:
    """Sums whose rounding depends on the order."""
    print("seed", SEED)
    others = Proposals(SEED, SLOT, 4)

    def body(rank: Rank) -> list[bytes]:
        chance = np.random.default_rng(rank.rank)
        results = []
        for step in range(STEPS):
            others.propose(rank)
            array = chance.standard_normal((100, 5000, 40_000)[step % 3]).astype(np.float32)
            results.append(rank.allreduce(array, f"x{step % 3}").tobytes())
        return results

    by_rank = run_ranks(body, hosts, **TUNED)
    for of_step in zip(*by_rank, strict=True):
        assert len(set(of_step)) == 1


def test_final_values_are_those_of_all_ranks_and_of_process_sets() -> None:
    """Of one that exists by then, and of one that is made later; both go on working."""
    hosts, members = [2, 1], [1, 2]
    links = [make_team_links([0, 0, 1], members, sockets=4) for _ in range(2)]
    last = {"segment": 4096, "piece": 8192, "sockets": 2, "fusion": 0, "doubling": 1024, "carried": 0}
    last |= {"cycle": 0, "overlap": 1}

    def both(rank: Rank, team: int) -> None:
        if rank.rank in members:
            assert set(rank.allreduce(np.full(50_000, rank.rank, np.float32), "t", team=team)) == {3}

    def body(rank: Rank) -> None:
        teams = [rank.context.add_team(members, **links[0].get(rank.rank, {}))]
        values, is_final = rank.context.tuning()
        assert not is_final
        assert {knob: values[knob] for knob in FIRST} == FIRST
        both(rank, teams[0])
        if rank.rank == 0:
            rank.context.propose_tuning(dict(last, sockets=1))  # never in force: another follows before a batch
            rank.context.propose_tuning(last, is_final=True)
        rank.barrier()
        assert rank.context.tuning() == (last, True)
        teams.append(rank.context.add_team(members, **links[1].get(rank.rank, {})))
        for _ in range(5):
            for team in teams:
                both(rank, team)
        rank.barrier()

    run_ranks(body, hosts, **TUNED)


def test_without_first_values_nothing_changes() -> None:
    def body(rank: Rank) -> tuple[dict[str, int], bool]:
        with pytest.raises(UsageError, match="by rank 0, in a job that has begun with some"):
            rank.context.propose_tuning(dict.fromkeys(KNOBS, 1))
        return rank.context.tuning()

    assert run_ranks(body, [2]) == [(dict.fromkeys(KNOBS, 0), False)] * 2


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
