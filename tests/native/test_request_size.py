"""Requests of impossible sizes are refused, the largest travels; and tensors without elements."""

import native_build
import numpy as np
import pytest
from ranks import Rank, describe, on_ranks, run_ranks
from test_gather import gather

from horo.core import context
from horo.errors import UsageError

REQUEST_MAX = (64 << 20) - 11 - 65535 - 9  # in a message with the longest text that may go with it
DIMS_MAX = 64
FIXED_BYTES, TENSOR_BYTES = 29, 3 + 8 * DIMS_MAX
LAST = np.zeros((2, 3), np.float32)
"""By rank, what the last tensor of the largest request holds."""


def request_of(byte_count: int, rank: int = 0) -> context.RequestBuffer:
    """A group of tensors without elements, but for the last one, whose canonical form takes so many bytes."""
    count = (byte_count - FIXED_BYTES - 1) // TENSOR_BYTES
    name = "n" * (byte_count - FIXED_BYTES - count * TENSOR_BYTES)
    tensor = context.Tensor(64, 64, (0,) * DIMS_MAX, context.DTYPES["float32"])
    tensors = [tensor] * count
    tensors[-1] = describe([LAST[rank]], [LAST[rank]])[0]._replace(shape=(1,) * (DIMS_MAX - 1) + (3,))
    return context.RequestBuffer.of(context.OPS["allreduce"], name, tensors, reduce_op=1)


@pytest.mark.parametrize("byte_count", [REQUEST_MAX + 1, 65 << 20])
@on_ranks([1, 1])
def test_a_request_that_could_not_travel_is_refused_with_its_size(rank: Rank, byte_count: int) -> None:
    if rank.rank == 1:
        with pytest.raises(UsageError, match=f"takes {byte_count} bytes.* at most {REQUEST_MAX}.* several groups"):
            rank.context.submit(request_of(byte_count))
    assert rank.allreduce(np.ones(3)).tolist() == [2.0] * 3


@pytest.fixture(scope="module")
def largest() -> list[context.RequestBuffer]:
    """Of each rank."""
    return [request_of(REQUEST_MAX, rank) for rank in range(2)]


@pytest.mark.skipif(native_build.FLAVOUR == "thread", reason="what is looked for is memory, which the other one checks")
@pytest.mark.parametrize("hosts", [[2], [1, 1]], ids=str)
def test_the_largest_request_is_agreed_on(largest: list[context.RequestBuffer], hosts: list[int]) -> None:
    LAST[:] = [[1], [10]]

    def body(rank: Rank) -> None:
        rank.finish(rank.context.submit(largest[rank.rank]))

    run_ranks(body, hosts)
    assert LAST.tolist() == [[11.0] * 3] * 2


HUGE = 1 << 31
EMPTY = [(0,), (0, 5), (5, 0), (0, HUGE, HUGE), (HUGE, HUGE, 0), (HUGE, 0, HUGE), (0, 1 << 62, 1 << 62, 1 << 62)]
LAYOUTS = [[1], [2], [1, 1], [2, 1]]


def run(rank: Rank, op: str, name: str, shape: tuple[int, ...], **options: int) -> None:
    """On memory that nobody may touch."""
    tensor = context.Tensor(64, 64, shape, context.DTYPES["float32"])
    rank.context.run(context.RequestBuffer.of(context.OPS[op], name, [tensor], sync=True, **options))


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
        assert gather(rank, [(rank.rank + 1, *rows)], "float32") == [r + 1 for r in range(rank.size)]
    assert gather(rank, [(0, HUGE)], "float32") == [0] * rank.size


@pytest.mark.parametrize(
    ("op", "shape", "dimension"),
    [
        ("allreduce", (HUGE, HUGE), 1), ("broadcast", (1, 1 << 61), 1), ("reducescatter", (HUGE, HUGE), 1),
        ("allreduce", (0, -1), 1), ("allgather", (0, HUGE, HUGE), 2), ("allgather", (HUGE, HUGE), 1),
        ("allgather", (0, -1, 0), 1), ("alltoall", (0, HUGE, HUGE), 2),
    ],
)  # fmt: skip
@on_ranks([2])
def test_shapes_of_too_many_bytes_are_refused(rank: Rank, op: str, shape: tuple[int, ...], dimension: int) -> None:
    """One row of an allgather must fit even where there is none: another rank may have some."""
    with pytest.raises(UsageError, match=f"extent {shape[dimension]} of dimension {dimension} is impossible"):
        tensor = context.Tensor(64, 64, shape, context.DTYPES["float32"])
        rank.context.submit(context.RequestBuffer.of(context.OPS[op], "x", [tensor]))
    rank.barrier()
