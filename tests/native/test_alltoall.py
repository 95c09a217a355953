"""All-to-all: each rank gets what every other has for it, in the order of the ranks."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import native_build
import numpy as np
import pytest
from ranks import Rank, describe, on_ranks

from horo.core import context
from horo.errors import UsageError


@dataclass(frozen=True)
class Plan:
    """How many rows of how many columns each has for each, and what is in them."""

    rows: list[list[int]]
    columns: int = 1
    dtype: type = np.int32

    def block(self, origin: int, destination: int) -> np.ndarray:
        """Other values in each, and in each row."""
        rows = self.rows[origin][destination]
        values = np.arange(rows * self.columns) % 97 + 7 * origin + 3 * destination
        return values.reshape(rows, self.columns).astype(self.dtype)

    def given(self, rank: int) -> np.ndarray:
        return np.concatenate([self.block(rank, other) for other in range(len(self.rows))])

    def wanted(self, rank: int) -> np.ndarray:
        return np.concatenate([self.block(other, rank) for other in range(len(self.rows))])


def check(rank: Rank, plans: Sequence[Plan], name: str = "a") -> None:
    inputs = [plan.given(rank.rank) for plan in plans]
    tensors = [
        tensor._replace(splits=tuple(plan.rows[rank.rank]))
        for tensor, plan in zip(describe(inputs, inputs), plans, strict=True)
    ]
    handle = rank.context.submit(context.RequestBuffer.of(context.OPS["alltoall"], name, tensors))
    rank.context.wait(handle)
    for i, plan in enumerate(plans):
        data, received = rank.context.take_result(handle, i)
        assert received == [rows[rank.rank] for rows in plan.rows]
        wanted = plan.wanted(rank.rank)
        assert np.array_equal(np.frombuffer(data, plan.dtype).reshape(wanted.shape), wanted)
    rank.finish(handle)


def random_plan(size: int, seed: int, dtype: type = np.int32) -> Plan:
    """Any numbers of rows, many of them none."""
    draw = random.Random(seed)
    choices = draw.choice([[0, 1, 2], [0, 0, 0, 5000], [3], [0, 1, 700, 129], [1, 64, 65]])
    return Plan([[draw.choice(choices) for _ in range(size)] for _ in range(size)], draw.choice([1, 2, 5]), dtype)


@pytest.mark.parametrize(
    "host_of_rank",
    [[*range(hosts), 0, hosts - 1] for hosts in (*range(2, 14), 16, 17, 23)],
    ids=lambda host_of_rank: f"{len(host_of_rank) - 2} hosts",
)
@on_ranks("host_of_rank", spin_us=0)
def test_every_host_reaches_every_other(rank: Rank) -> None:
    """Also those without a link, over others."""
    check(rank, [Plan([[1 + (s + 2 * d) % 5 for d in range(rank.size)] for s in range(rank.size)], 11)])
    check(rank, [random_plan(rank.size, step, dtype) for step, dtype in enumerate((np.uint8, np.float64, bool))])


@pytest.mark.parametrize(("hosts", "direct_bytes"), [([70], 1), ([33, 32], 0)], ids=str)
@on_ranks("hosts", "direct_bytes", segment_bytes=1 << 12, spin_us=0)
def test_many_ranks(rank: Rank) -> None:
    steps = 1 if native_build.FLAVOUR else 3  # so many threads share one interpreter that a sanitizer slows down
    for step in range(steps):
        check(rank, [random_plan(rank.size, step)])


@pytest.mark.parametrize(
    ("splits", "said"),
    [
        ((1, 1), "2 splits; 3 ranks take part"),
        ((1, 1, 1, 1), "4 splits; 3 ranks take part"),
        ((2, -1, 3), "split 1 is -1; it must be 0 or more"),
        ((2, 2, 2), "the splits up to number 1 are more than the .* rows of the tensor"),
        ((1, 0, 1), "1 of the 3 rows of the tensor are in no split"),
        ((), "3 of the 3 rows of the tensor are in no split"),
    ],
)
@on_ranks([3])
def test_wrong_splits_are_refused_where_they_are_submitted(rank: Rank, splits: tuple[int, ...], said: str) -> None:
    array = np.ones((sum(splits) if len(splits) in (2, 4) else 3, 2), np.float32)
    (tensor,) = describe([array], [array])
    with pytest.raises(UsageError, match=f"alltoall 'a': {said}"):
        rank.context.submit(context.RequestBuffer.of(context.OPS["alltoall"], "a", [tensor._replace(splits=splits)]))
    check(rank, [random_plan(3, 1)])


@on_ranks([2], [1, 1])
def test_more_rows_than_one_rank_can_get_are_refused_on_all_ranks(rank: Rank) -> None:
    tensor = context.Tensor(64, 64, (1 << 62, 0), context.DTYPES["float32"])._replace(splits=(1 << 62, 0))
    handle = rank.context.submit(context.RequestBuffer.of(context.OPS["alltoall"], "huge", [tensor]))
    with pytest.raises(UsageError, match=rf"'huge': the rows of all {rank.size} ranks .* larger"):
        rank.context.wait(handle)
    rank.context.release(handle)
    rank.barrier()
