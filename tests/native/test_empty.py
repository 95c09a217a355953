"""Tensors without elements, however large their other extents are."""

from __future__ import annotations

import pytest
from ranks import Rank, on_ranks

from horo.core import context
from horo.errors import UsageError

HUGE = 1 << 31
EMPTY = [(0,), (0, 5), (5, 0), (0, HUGE, HUGE), (HUGE, HUGE, 0), (HUGE, 0, HUGE), (0, 1 << 62, 1 << 62, 1 << 62)]
LAYOUTS = [[1], [2], [1, 1], [2, 1]]


def run(rank: Rank, op: str, name: str, shape: tuple[int, ...], **options: int) -> None:
    """On memory that nobody may touch."""
    tensor = context.Tensor(64, 64, shape, context.DTYPES["float32"])
    rank.context.run(context.RequestBuffer.of(context.OPS[op], name, [tensor], sync=True, **options))


def gather(rank: Rank, name: str, shape: tuple[int, ...]) -> list[int]:
    tensor = context.Tensor(64, 64, shape, context.DTYPES["float32"])
    handle = rank.context.submit(context.RequestBuffer.of(context.OPS["allgather"], name, [tensor]))
    try:
        rank.context.wait(handle)
        data, first_dims = rank.context.take_result(handle, 0)
    finally:
        rank.context.release(handle)
    assert len(data) == 0
    return list(first_dims)


@pytest.mark.parametrize("shape", EMPTY, ids=str)
@on_ranks(*LAYOUTS)
def test_a_tensor_without_elements_is_reduced_and_broadcast(rank: Rank, shape: tuple[int, ...]) -> None:
    for step in range(2):  # in full, then by id
        run(rank, "allreduce", "x", shape, reduce_op=step)
        run(rank, "reducescatter", "s", shape, reduce_op=step)
        run(rank, "broadcast", "b", shape)


@on_ranks(*LAYOUTS)
def test_rows_without_elements_are_gathered(rank: Rank) -> None:
    for rows in ((0,), (HUGE, HUGE, 0), (0, HUGE, HUGE, HUGE)):
        assert gather(rank, f"g{rows}", (rank.rank + 1, *rows)) == [r + 1 for r in range(rank.size)]
    assert gather(rank, "none", (0, HUGE)) == [0] * rank.size


@pytest.mark.parametrize(
    ("op", "shape", "dimension"),
    [
        ("allreduce", (HUGE, HUGE), 1),
        ("broadcast", (1, 1 << 61), 1),
        ("reducescatter", (HUGE, HUGE), 1),
        ("allreduce", (0, -1), 1),
        ("allgather", (0, HUGE, HUGE), 2),
        ("allgather", (HUGE, HUGE), 1),
        ("allgather", (0, -1, 0), 1),
        ("alltoall", (0, HUGE, HUGE), 2),
    ],
)
@on_ranks([2])
def test_a_shape_of_too_many_bytes_is_refused_where_it_is_submitted(
    rank: Rank, op: str, shape: tuple[int, ...], dimension: int
) -> None:
    """One row of an allgather must fit even where there is none: another rank may have some."""
    with pytest.raises(UsageError, match=f"extent {shape[dimension]} of dimension {dimension} is impossible"):
        rank.context.submit(
            context.RequestBuffer.of(context.OPS[op], "x", [context.Tensor(64, 64, shape, context.DTYPES["float32"])])
        )
    rank.barrier()
