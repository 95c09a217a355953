"""What ranks agree on: which names are known by an id, how large a message gets, and what differs."""

import re
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from ranks import Rank, Written, on_ranks, run_ranks, wait_for

from horo.core import context
from horo.errors import MismatchError


def hits(rank: Rank, names: Sequence[str]) -> int:
    """How many of these, one after another, are announced by id."""
    before = rank.context.counters()["cache_hits"]
    for name in names:
        rank.run("barrier", name, [])
    return rank.context.counters()["cache_hits"] - before


@pytest.mark.parametrize("count", [65, 80, 256])
@on_ranks([1], cache_capacity=64)
def test_a_cache_too_small_for_all_names_of_a_step_serves_those_it_holds(rank: Rank, count: int) -> None:
    """Who evicts for every newcomer has no hit in such a cycle; nobody can have more than the capacity."""
    assert [hits(rank, [f"n{i}" for i in range(count)]) for _ in range(20)] == [0] + [64] * 19


@on_ranks([1], cache_capacity=64)
def test_names_that_are_not_used_any_more_make_room_in_the_end(rank: Rank) -> None:
    """Also among ones that are used once, of which whoever lets in one of a number may let in only those."""
    hits(rank, [f"start{i}" for i in range(1000)])
    names = [f"n{i}" for i in range(50)]
    assert hits(rank, names) == 0
    for _ in range(400):
        hits(rank, names)
    assert hits(rank, names) == 50
    for step in range(1200):
        hits(rank, [f"step{step}", "loss"])
    assert hits(rank, ["loss"]) == 1


@on_ranks([1], fusion_bytes=1 << 40, cycle_time_us=2_000_000)
def test_a_batch_of_the_longest_names_is_a_message_of_allowed_size(rank: Rank) -> None:
    """Of 70,000 names that are ready at once, a message has room for 65,000."""
    array = np.ones(70_000, np.uint8)
    names = [f"{i:01023d}" for i in range(len(array))]
    submit = partial(rank.submit, "allreduce", reduce_op=1, transient=True)
    rank.finish(*[submit(name, [array[i : i + 1]]) for i, name in enumerate(names)])


FACTORS = {
    (0.5, 0.25): ("0.5", "0.25"),
    (0.1, 0.1 + 1e-12): ("0.1", "0.100000000001"),
    (1 / 3, 1 / 3 + 2**-54): ("0.3333333333333333", "0.3333333333333334"),
    (1e300, -0.0): ("1e+300", "-0"),
}


@pytest.mark.parametrize("place", ["prescale", "postscale"])
@on_ranks([2])
def test_factors_that_differ_read_as_different(rank: Rank, place: str) -> None:
    for factors, said in FACTORS.items():
        one, other = ({"prescale": "1", "postscale": "1", place: value} for value in said)
        texts = [f"prescale factor {e['prescale']} and postscale factor {e['postscale']}" for e in (one, other)]
        expected = rf"rank 0 \(host0\) sent {re.escape(texts[0])}, rank 1 \(host0\) sent {re.escape(texts[1])}"
        with pytest.raises(MismatchError, match=expected):
            rank.allreduce(np.ones(2), f"x{factors}", **{place: factors[rank.rank]})


TEAMS = [
    ([0, 1], [1], "[0, 1]", "[1]"),
    (range(40), [*range(38), 39], "[..., 36, 37, 38, 39]", "[..., 36, 37, 39]"),
    (range(40), range(39), "[..., 37, 38, 39]", "[..., 37, 38]"),
    (range(5, 40), range(6, 40), f"{[*range(5, 25)]}"[:-1] + ", ...]", f"{[*range(6, 26)]}"[:-1] + ", ...]"),
]


@on_ranks([40], segment_bytes=1 << 12)
def test_teams_that_differ_read_as_different(rank: Rank) -> None:
    for one, other, *said in TEAMS:
        expected = f"rank 0 (host0) calls add_process_set for the ranks {said[0]}, rank 1 (host0) "
        expected += f"add_process_set for the ranks {said[1]}; all ranks must add and remove the same"
        with pytest.raises(MismatchError, match=re.escape(expected)):
            rank.context.add_team([*(other if rank.rank == 1 else one)])


@pytest.mark.parametrize("hosts", [[2], [1, 2]], ids=str)
def test_rows_that_no_message_can_hold_fail_for_all_ranks(hosts: list[int]) -> None:
    """A leader that cannot pass them on says so instead."""
    count = 127_000
    tensor = context.Tensor(64, 64, (2**61, 0, *[1] * 62), context.DTYPES["float32"])
    request = context.RequestBuffer.of(context.OPS["allgather"], "g", [tensor] * count)
    text = f"allgather 'g': the first extents of its {count} tensors on [23] ranks take .* can travel as one request"

    def body(rank: Rank) -> None:
        handle = rank.context.submit(request)
        with pytest.raises(Exception, match=text):
            rank.context.wait(handle)
        rank.context.release(handle)
        assert rank.allreduce(np.ones(3)).tolist() == [rank.size] * 3

    run_ranks(body, hosts)


@on_ranks([3], [1, 1], cache_capacity=5000)
def test_as_many_names_are_cached_as_the_capacity_says(rank: Rank) -> None:
    for step in range(3):
        rank.finish(*[rank.submit("barrier", f"n{i}", []) for i in range(5000)])
        assert rank.context.counters()["cache_hits"] == step * 5000


@pytest.mark.parametrize("early", [0, 1, 2])
@on_ranks([3], [1, 1, 1], [2, 1], [1, 2], cache_capacity=2)
def test_a_name_that_waits_while_others_take_its_place_in_the_cache_is_announced_anew(rank: Rank, early: int) -> None:
    for turn in range(4):
        for _ in range(2):
            assert (rank.allreduce(np.ones(3), "x") == 3).all()
        waiting = [np.ones(3)]
        handle = rank.submit("allreduce", "x", waiting, reduce_op=1) if rank.rank == early else 0
        for number in range(100):  # of which a few are let in
            rank.barrier(f"{turn} {number}")
        if rank.rank == early:
            rank.finish(handle)
            assert (waiting[0] == 3).all()
        else:
            assert (rank.allreduce(np.ones(3), "x") == 3).all()


@on_ranks([3], stall_warning_ms=2000)
def test_a_rank_that_is_late_is_named_also_after_more_names_than_it_can_show(rank: Rank, written: Written) -> None:
    """The leader is late itself and parked, so rank 1 must tell by what the others show."""
    handles = [rank.submit("barrier", f"n{i}", []) for i in range(6000)]
    rank.finish(*handles)
    if rank.rank == 0:
        wait_for(lambda: "rank 0 (host0) has not submitted 'late'" in written())
    rank.barrier("late")
