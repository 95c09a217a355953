"""Reduce, gather and scatter: only the root gets, or gives, what there is of all. A reduce-scatter gives all a part."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from ranks import NUMPY_OF_DTYPE, SUM, Rank, describe, on_ranks, over_every_layout, rows_of

from horo.core import context
from horo.core.context import Tensor
from horo.errors import MismatchError, UsageError

NULL = 0
SIZES = (0, 1, 5, 1000, 20_001)


def run(rank: Rank, op: str, name: str, tensors: Sequence[Tensor], **options: Any) -> None:
    rank.context.run(context.RequestBuffer.of(context.OPS[op], name, tensors, sync=True, **options))


def address(array: np.ndarray | None) -> int:
    return NULL if array is None else array.ctypes.data


def tensor(given: np.ndarray | None, got: np.ndarray | None, like: np.ndarray, wire: str | None = None) -> Tensor:
    """Of the shape and dtype of ``like``."""
    (described,) = describe([like], [like], [wire])
    return described._replace(input=address(given), output=address(got))


def reduce(rank: Rank, array: np.ndarray, root: int, name: str = "r", op: str = "sum", **options: Any) -> Any:
    """The result at the root, None elsewhere; where nothing is scaled, every other time into the input."""
    wire = options.pop("wire", None)
    kept, is_root = array.copy(), rank.rank == root
    got = np.full_like(array, 99) if is_root else None
    reduce_op = context.REDUCE_OPS[op]
    run(rank, "reduce", name, [tensor(array, got, array, wire)], root_rank=root, reduce_op=reduce_op, **options)
    assert np.array_equal(array, kept)
    target = array if is_root else None
    run(rank, "reduce", name, [tensor(array, target, array, wire)], root_rank=root, reduce_op=reduce_op, **options)
    assert np.array_equal(array, got if is_root else kept)
    return got


def blocks(rank: Rank, like: np.ndarray, root: int) -> np.ndarray | None:
    return np.full((rank.size, *like.shape), 99, like.dtype) if rank.rank == root else None


def numbered(rank: int, count: int, dtype: Any = np.float64) -> np.ndarray:
    return ((np.arange(count) + 7 * rank) % 100).astype(dtype)


@over_every_layout
@pytest.mark.parametrize(("segment_bytes", "direct_bytes"), [(1 << 12, 0), (1 << 18, 4096)])
@on_ranks("host_of_rank", "segment_bytes", "direct_bytes")
def test_any_root_and_group_over_any_layout(rank: Rank) -> None:
    """A group of one tensor of each size, and one of all of them and of other dtypes."""
    groups = [[("float64", size)] for size in SIZES]
    groups.append([("float32", 3), ("int64", 10), ("float64", 9001), ("float32", 0), ("float16", 11)])
    for step, kinds in enumerate(groups):
        mine = [numbered(rank.rank, count, dtype) for dtype, count in kinds]
        every = [np.stack([numbered(r, count, dtype) for r in range(rank.size)]) for dtype, count in kinds]
        for root in {0, step % rank.size, rank.size - 1}:
            got = [np.full_like(array, 99) if rank.rank == root else None for array in mine]
            tensors = [tensor(a, b, a) for a, b in zip(mine, got, strict=True)]
            run(rank, "reduce", f"r{step}", tensors, root_rank=root, reduce_op=context.REDUCE_OPS["max"])
            gathered = [blocks(rank, array, root) for array in mine]
            tensors = [tensor(a, b, a) for a, b in zip(mine, gathered, strict=True)]
            run(rank, "gather", f"g{step}", tensors, root_rank=root)
            received = [np.full_like(array, 99) for array in mine]
            tensors = [tensor(b, c, a) for a, b, c in zip(mine, gathered, received, strict=True)]
            run(rank, "scatter", f"s{step}", tensors, root_rank=root)
            for i, all_of_it in enumerate(every):
                assert np.array_equal(received[i], mine[i])
                if rank.rank == root:
                    assert np.array_equal(got[i], all_of_it.max(axis=0))
                    assert np.array_equal(gathered[i], all_of_it)


@pytest.mark.parametrize("dtype", sorted(NUMPY_OF_DTYPE))
@pytest.mark.parametrize(("hosts", "direct_bytes"), [([2], 1), ([3], 0), ([5], 1), ([1, 1], 0), ([2, 2], 1)], ids=str)
@on_ranks("hosts", "direct_bytes", segment_bytes=1 << 15)
def test_on_every_layout_the_bits_are_those_of_an_allreduce(rank: Rank, dtype: str) -> None:
    kind = np.dtype(NUMPY_OF_DTYPE[dtype])
    ops = ["sum", "min", "max", "product", *(["average"] if dtype != "bool" else [])]
    ops += ["band", "bor", "bxor"] if kind.kind != "f" else []
    forms: list[tuple[str, str | None, dict[str, float]]] = [(op, None, {}) for op in ops]
    if dtype == "float32":
        forms += [("average", None, {"prescale": 0.3, "postscale": 4.0}), ("sum", "float16", {})]
    for count, (op, wire, factors) in itertools.product((1, 9, 4097, 60_000), forms):
        values = (np.random.default_rng(rank.rank).standard_normal(count) * 3).astype(kind)
        name = f"{count} {wire} {factors}"
        whole = rank.allreduce(values.copy(), f"a{name}", op, wires=[wire], **factors)
        part = rank.reducescatter(values, f"s{name}", op, wires=[wire], **factors)
        assert np.array_equal(part, whole[rows_of(count, rank.size, rank.rank)], equal_nan=kind.kind == "f")
        got = reduce(rank, values, rank.size - 1, f"r{name}", op, wire=wire, **factors)
        assert got is None or np.array_equal(got, whole, equal_nan=kind.kind == "f")


@on_ranks([2], [4], [1, 2], direct_bytes=0)
def test_the_block_of_the_root_may_be_where_it_belongs(rank: Rank) -> None:
    every = np.stack([numbered(r, 3000) for r in range(rank.size)])
    whole = every.copy()
    mine = whole[rank.rank] if rank.rank == 1 else numbered(rank.rank, 3000)
    if rank.rank == 1:
        whole[:1] = 99
        whole[2:] = 99
    run(rank, "gather", "g", [tensor(mine, whole if rank.rank == 1 else None, mine)], root_rank=1)
    assert rank.rank != 1 or np.array_equal(whole, every)
    mine[:] = every[1] if rank.rank == 1 else 99
    run(rank, "scatter", "s", [tensor(whole if rank.rank == 1 else None, mine, mine)], root_rank=1)
    assert np.array_equal(mine, every[rank.rank])


@on_ranks([4], [1, 3], [2, 2])
def test_in_a_process_set_the_root_is_a_rank_of_the_job(rank: Rank) -> None:
    team = rank.add_team([1, 3])
    if rank.rank in {1, 3}:
        mine = numbered(rank.rank, 300)
        got = reduce(rank, mine.copy(), 3, team=team)
        gathered = np.full((2, 300), 99.0) if rank.rank == 3 else None
        run(rank, "gather", "g", [tensor(mine, gathered, mine)], root_rank=3, team=team)
        if gathered is not None:
            assert np.array_equal(gathered, np.stack([numbered(1, 300), numbered(3, 300)]))
            assert np.array_equal(got, numbered(1, 300) + numbered(3, 300))
        with pytest.raises(UsageError, match=r"gather 'g': root rank 0 is no member of process set 1"):
            run(rank, "gather", "g", [tensor(mine, gathered, mine)], root_rank=0, team=team)
    rank.barrier("end")


@on_ranks([3])
def test_with_a_rank_that_has_joined_they_fail(rank: Rank) -> None:
    one = np.ones(3)
    if rank.rank == 2:
        rank.context.finish(rank.context.start_join(0))
        return
    with pytest.raises(MismatchError, match="reduce 'r': rank 2 has joined and can neither send nor receive anything"):
        run(rank, "reduce", "r", [tensor(one, one, one)], reduce_op=SUM)
    rank.context.finish(rank.context.start_join(0))
