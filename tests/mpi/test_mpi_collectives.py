"""All collectives with data between hosts by MPI; expected values come from arithmetic."""

import functools
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from adasum_oracle import adasum, tolerance
from known_answers import SIZES, Proposals, adasum_rows, adasums, collectives
from mpi_job import MODES, SEGMENT_BYTES, MpiRank, join
from ranks import NUMPY_OF_DTYPE
from trace_events import parse_timeline, rows_of

from horo.core import context
from horo.core.context import RequestBuffer, Tensor
from horo.errors import UsageError

pytestmark = pytest.mark.mpi(min_size=2)

COUNTS = [1, 7, 1000, 70_001]
DTYPES = ["uint8", "float16", "float32", "float64"]
"""One of each width that messages are cut at."""


def values(rank: int, count: int, dtype: str) -> np.ndarray:
    """What a rank contributes: so small that every dtype holds the sums exactly."""
    return (1 + (np.arange(count) * 7 + rank * 3) % 5).astype(NUMPY_OF_DTYPE[dtype])


@functools.cache
def expected(size: int, count: int, dtype: str) -> np.ndarray:
    parts = [values(rank, count, dtype) for rank in range(size)]
    array: np.ndarray = np.sum(parts, axis=0, dtype=NUMPY_OF_DTYPE[dtype])
    array.setflags(write=False)
    return array


def assert_same_bits(rank: MpiRank, array: np.ndarray) -> None:
    assert len({bytes(told) for told in rank.everybody(array.tobytes())}) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce(rank: MpiRank, dtype: str) -> None:
    for count in COUNTS:
        array = values(rank.rank, count, dtype)
        rank.allreduce(array, name=f"{dtype} {count}")
        assert np.array_equal(array, expected(rank.size, count, dtype))


def test_large_floats_give_the_sum_and_the_same_bits_everywhere(rank: MpiRank) -> None:
    count = (1 << 20) + 3
    inputs = [np.random.default_rng(r).standard_normal(count, np.float32) for r in range(rank.size)]
    array = inputs[rank.rank].copy()
    rank.allreduce(array, name="large")
    exact = np.sum(inputs, axis=0, dtype=np.float64)
    magnitude = np.sum(np.abs(inputs), axis=0, dtype=np.float64)
    assert np.all(np.abs(array - exact) <= magnitude * rank.size * 2.0**-24)
    assert_same_bits(rank, array)


@pytest.mark.parametrize(("dtype", "digits"), [("float16", 11), ("float32", 24), ("float64", 52)])
def test_adasum_of_each_tensor(rank: MpiRank, dtype: str, digits: int) -> None:
    counts = [1, 7, 0, 1000, 70_001]
    seeds = [[[r, n] for n in counts] for r in range(rank.size)]
    inputs = [[np.random.default_rng(seed).standard_normal(seed[1]).astype(dtype) for seed in row] for row in seeds]
    arrays = [array.copy() for array in inputs[rank.rank]]
    rank.finish(rank.submit("allreduce", f"adasum {dtype}", arrays, reduce_op=context.REDUCE_OPS["adasum"]))
    for i, array in enumerate(arrays):
        vectors = [mine[i] for mine in inputs]
        assert np.abs(array - adasum(vectors)).max(initial=0) <= tolerance(vectors, digits)
        assert_same_bits(rank, array)
    lone = values(0, 5000, dtype)  # equal on all ranks
    rank.allreduce(lone, name=f"adasum of equal {dtype}", op="adasum", prescale=2.0, postscale=0.25)
    assert np.array_equal(lone, values(0, 5000, dtype) / 2)


def scattered(rank: MpiRank, whole: np.ndarray) -> np.ndarray:
    """The rows of this rank: the first ranks have one more."""
    return np.array_split(whole, rank.size)[rank.rank]


@pytest.mark.parametrize("dtype", DTYPES)
def test_reducescatter(rank: MpiRank, dtype: str) -> None:
    for count in COUNTS:
        array = values(rank.rank, count, dtype)
        wanted = scattered(rank, expected(rank.size, count, dtype))
        output = np.zeros_like(wanted)
        reduce_op = context.REDUCE_OPS["sum"]
        rank.finish(rank.submit("reducescatter", f"s {dtype} {count}", [array], outputs=[output], reduce_op=reduce_op))
        assert np.array_equal(output, wanted)
        assert np.array_equal(array, values(rank.rank, count, dtype))


@pytest.mark.parametrize("rows", [0, 1, 300, 100_000])
def test_alltoall_of_unequal_splits(rank: MpiRank, rows: int) -> None:
    splits = [[rows * ((s + 2 * d) % 3) for d in range(rank.size)] for s in range(rank.size)]
    array = np.concatenate([np.full((n, 3), 10 * rank.rank + d, np.int16) for d, n in enumerate(splits[rank.rank])])
    tensor = Tensor(array.ctypes.data, 0, array.shape, context.DTYPES["int16"], splits=tuple(splits[rank.rank]))
    for _ in range(2):
        handle = rank.context.submit(RequestBuffer.of(context.OPS["alltoall"], f"exchange {rows}", [tensor]))
        rank.context.wait(handle)
        data, received = rank.context.take_result(handle, 0)
        rank.context.release(handle)
        wanted = [np.full((splits[s][rank.rank], 3), 10 * s + rank.rank, np.int16) for s in range(rank.size)]
        assert received == [len(part) for part in wanted]
        assert np.array_equal(np.frombuffer(data, np.int16).reshape(-1, 3), np.concatenate(wanted))


def test_barriers_and_an_error_that_all_agree_on(rank: MpiRank) -> None:
    rank.barrier()
    with pytest.raises(UsageError, match="rank 0"):
        rank.allreduce(np.zeros(3 + (rank.rank == 0), np.float32), name="shapes differ")
    rank.barrier("afterwards")


def test_nothing_pending_means_no_wake_up(rank: MpiRank) -> None:
    rank.allreduce(np.ones(100_000, np.float32), name="before")
    rank.comm.Barrier()
    sleeps = []
    for _ in range(5):  # on a busy machine a thread may come to rest only in a later round
        before = rank.context.counters()["sleeps"]
        rank.comm.Barrier()  # a round of messages among all ranks: long for a leader that looks every 20 us
        for _ in range(50):
            rank.comm.Barrier()
        sleeps.append(rank.context.counters()["sleeps"] - before)
    assert min(sleeps) <= 2, sleeps


def test_an_adasum_has_its_phases_on_each_rank(rank: MpiRank, tmp_path: Path) -> None:
    """The ranks' own files: all have what they have done together."""
    path = tmp_path / f"timeline-{rank.rank}.json"
    rank.context.start_timeline(str(path))
    rank.barrier("begun")
    adasums(rank)
    rank.context.stop_timeline()
    rows = rows_of(parse_timeline(path))
    expected = adasum_rows("MPI", levels=(rank.size - 1).bit_length())
    assert {name: rows[name] for name in expected} == expected


STEPS = 40
SEED = random.SystemRandom().getrandbits(31) | 1


@pytest.fixture(params=MODES, ids=str)
def tuned(request: pytest.FixtureRequest) -> Iterator[MpiRank]:
    """A rank of a job whose values may change."""
    with join(request.param, {"sockets": 1, "segment": SEGMENT_BYTES // 4, "cycle": 200, "overlap": 2}) as joined:
        print("seed", joined.comm.bcast(SEED))
        yield joined


@pytest.fixture
def others() -> Proposals:
    return Proposals(SEED, SEGMENT_BYTES, 1)


def values_of(rank: MpiRank) -> tuple[int, ...]:
    """What the next operation runs with: between two operations, the same on all ranks."""
    values = tuple(rank.context.tuning()[0].values())
    assert rank.everybody(values) == [values] * rank.size
    return values


def test_all_ranks_change_over_at_one_place_and_results_are_right(tuned: MpiRank, others: Proposals) -> None:
    seen = set()
    for step in range(STEPS):
        others.propose(tuned)
        collectives(tuned, step)
        seen.add(values_of(tuned))
    assert len(seen) > STEPS / 4


def test_process_sets_come_work_and_go_while_values_change(tuned: MpiRank, others: Proposals) -> None:
    for step in range(8):
        members = sorted(random.Random(step).sample(range(tuned.size), 1 + step % tuned.size))
        team = tuned.job.add_team(members)
        for turn in range(5):
            others.propose(tuned)
            collectives(tuned, 5 * step + turn)
            if tuned.rank in members:
                array = np.full(SIZES[turn + 1], tuned.rank + 1, np.float32)
                assert set(tuned.allreduce(array, "t", team=team)) == {sum(members) + len(members)}
        tuned.context.remove_team(team)
