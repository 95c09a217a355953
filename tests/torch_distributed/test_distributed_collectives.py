"""Every collective of torch.distributed over horo, against values that each rank works out for itself."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import on

DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
COMPLEX = ["complex64", "complex128"]
SHAPES = [(), (1,), (7,), (3, 5), (0,), (70_001,)]
OPS = ["SUM", "AVG", "MIN", "MAX", "PRODUCT"]


def value(rank: int, dtype: str, shape: Sequence[int], salt: int = 0) -> torch.Tensor:
    """What a rank gives: small numbers, so that each dtype adds them up exactly."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) + rank + salt) % 3 + (rank % 2)
    if dtype.startswith("complex"):
        return torch.complex(numbers.double(), (numbers - 1).double()).to(getattr(torch, dtype)).view(shape)
    return numbers.to(getattr(torch, dtype)).view(shape)


def reduced(op: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reduction of what all ranks give, in torch's own arithmetic."""
    dtype = parts[0].dtype
    wide = dtype if dtype.is_complex else torch.float64
    stacked = torch.stack([part.to(wide) for part in parts])
    if op in ("MIN", "MAX"):
        result = stacked.amin(0) if op == "MIN" else stacked.amax(0)
    else:
        result = functools.reduce(torch.mul if op == "PRODUCT" else torch.add, stacked)
    if op == "AVG":
        result = result / len(parts)
        result = result if dtype.is_floating_point or dtype.is_complex else result.trunc()
    return result.to(dtype)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in every second place of another tensor."""
    spread = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    spread[..., 0] = tensor
    return spread[..., 0]


def do(call: Any, *args: Any, is_async: bool, **options: Any) -> None:
    """Calls a collective, and waits for it in either way."""
    work = call(*args, async_op=is_async, **options)
    assert (work is not None) == is_async
    if work is not None:
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()


@pytest.mark.parametrize("dtype", DTYPES)
@on("group")
def test_all_reduce(dtype: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for op, shape, is_strided, is_async in cases(dtype, SHAPES):
        tensor = value(rank, dtype, shape)
        tensor = strided(tensor) if is_strided else tensor
        before, case = tensor._version, (op, shape, is_strided, is_async)
        do(dist.all_reduce, tensor, op=getattr(dist.ReduceOp, op), is_async=is_async)
        assert torch.equal(tensor, reduced(op, [value(each, dtype, shape) for each in range(size)])), case
        assert tensor._version > before, case


def cases(dtype: str, shapes: Sequence[tuple[int, ...]]) -> list[tuple[str, tuple[int, ...], bool, bool]]:
    """Each reduction of each shape; every shape, and every reduction, strided or not, with a work or without one."""
    ways = [(False, False), (True, True), (False, True), (True, False)]
    ops = [op for op in OPS if (op, dtype) != ("AVG", "bool")]  # there is no such thing
    pairs = itertools.product(enumerate(ops), enumerate(shapes))
    return [(op, shape, *ways[(a + b) % len(ways)]) for (a, op), (b, shape) in pairs]


@pytest.mark.parametrize("dtype", COMPLEX)
@on("group")
def test_complex_numbers(dtype: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = value(rank, dtype, (3, 4))
    dist.all_reduce(tensor)
    torch.testing.assert_close(tensor, reduced("SUM", [value(each, dtype, (3, 4)) for each in range(size)]))
    gathered = [torch.empty(2, dtype=tensor.dtype) for _ in range(size)]
    dist.all_gather(gathered, value(rank, dtype, (2,)))
    torch.testing.assert_close(gathered, [value(each, dtype, (2,)) for each in range(size)])


REFUSED: dict[str, Callable[[Any, int], object]] = {
    "a sum of float8": lambda group, _: dist.all_reduce(torch.ones(2).to(torch.float8_e5m2), group=group),
    "float8 to one rank": lambda group, _: dist.reduce(torch.ones(2).to(torch.float8_e5m2), 1, group=group),
    "the bits of floats": lambda group, _: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND, group=group),
    "an average of bools": lambda group, _: dist.all_reduce(
        torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG, group=group
    ),
    "parts of float8": lambda group, size: dist.reduce_scatter_tensor(
        torch.ones(2).to(torch.float8_e5m2), torch.ones(2 * size).to(torch.float8_e5m2), group=group
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@on("group2")
def test_a_group_of_one_rank_refuses_what_larger_ones_do(case: str) -> None:
    texts = []
    alone = dist.new_group([1])
    for group, size in ((dist.group.WORLD, 2), (alone, 1)):
        if size == 2 or dist.get_rank() == 1:
            with pytest.raises(NotImplementedError) as error:
                REFUSED[case](group, size)
            texts.append(str(error.value))
    assert texts[-1] == texts[0]
    dist.barrier()
    dist.destroy_process_group(alone)


@on("group")
def test_premultiplied_sum_and_refused_reductions() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((4,), float(rank + 1))
    dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(0.5))
    assert tensor.tolist() == [size * (size + 1) / 4] * 4
    with pytest.raises(NotImplementedError, match=r"float8_e5m2"):
        dist.all_reduce(torch.ones(2).to(torch.float8_e5m2))
    dist.barrier()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@on("group")
def test_broadcast_from_each_rank(dtype: str, is_async: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for shape, root in itertools.product(SHAPES, range(size)):
        tensor = strided(value(rank, dtype, shape, salt=root))
        do(dist.broadcast, tensor, root, is_async=is_async)
        assert torch.equal(tensor, value(root, dtype, shape, salt=root)), (shape, root)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@on("group")
def test_gathers(dtype: str, is_async: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for shape in SHAPES[1:]:
        own, all_ = value(rank, dtype, shape), [value(each, dtype, shape) for each in range(size)]
        listed = [strided(torch.zeros_like(own)) for _ in range(size)]
        do(dist.all_gather, listed, strided(own), is_async=is_async)
        assert all(torch.equal(got, want) for got, want in zip(listed, all_, strict=True)), shape
        for target_shape in ((size * shape[0], *shape[1:]), (size, *shape)):
            target = torch.zeros(target_shape, dtype=own.dtype)
            do(dist.all_gather_into_tensor, target, own, is_async=is_async)
            assert torch.equal(target.view(size, *shape), torch.stack(all_)), target_shape


@pytest.mark.parametrize("dtype", DTYPES)
@on("group")
def test_reduce_scatters(dtype: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for op, shape, is_strided, is_async in cases(dtype, SHAPES[1:]):
        case = (op, shape, is_strided, is_async)
        given = [[value(each, dtype, shape, salt=to) for to in range(size)] for each in range(size)]
        want = reduced(op, [given[each][rank] for each in range(size)])
        reduce_op = getattr(dist.ReduceOp, op)
        laid = strided if is_strided else torch.clone
        output = laid(torch.zeros_like(want))
        do(dist.reduce_scatter, output, [laid(each) for each in given[rank]], op=reduce_op, is_async=is_async)
        assert torch.equal(output, want), case
        output = torch.zeros_like(want)
        do(dist.reduce_scatter_tensor, output, torch.cat(given[rank]), op=reduce_op, is_async=is_async)
        assert torch.equal(output, want), case


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@on("group")
def test_all_to_all(dtype: str, is_async: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def part(sender: int, receiver: int) -> torch.Tensor:
        return value(sender, dtype, (sender + 2 * receiver, 3), salt=receiver)

    sent = [part(rank, other) for other in range(size)]
    want = [part(other, rank) for other in range(size)]
    output = torch.zeros_like(torch.cat(want))
    splits = [len(each) for each in want], [len(each) for each in sent]
    do(dist.all_to_all_single, output, torch.cat(sent), *splits, is_async=is_async)
    assert torch.equal(output, torch.cat(want))
    received = [strided(torch.zeros_like(each)) for each in want]
    do(dist.all_to_all, received, [strided(each) for each in sent], is_async=is_async)
    assert all(torch.equal(got, each) for got, each in zip(received, want, strict=True))
    even = torch.zeros(2 * size, dtype=sent[0].dtype)
    do(dist.all_to_all_single, even, value(rank, dtype, (2 * size,)), is_async=is_async)
    assert torch.equal(even, torch.cat([value(other, dtype, (2 * size,)).view(size, 2)[rank] for other in range(size)]))


@pytest.mark.parametrize("is_async", [False, True])
@on("group")
def test_many_tensors_at_once(is_async: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    shapes = [(3,), (4, 2), (1,)]
    tensors = [value(rank, "float32", shape) for shape in shapes]
    with dist._coalescing_manager(async_ops=is_async) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    if is_async:
        manager.wait()
    for tensor, shape in zip(tensors, shapes, strict=True):
        assert torch.equal(tensor, reduced("SUM", [value(each, "float32", shape) for each in range(size)]))
    outputs = [torch.zeros((size * shape[0], *shape[1:])) for shape in shapes]
    with dist._coalescing_manager(async_ops=is_async) as manager:
        for output, shape in zip(outputs, shapes, strict=True):
            dist.all_gather_into_tensor(output, value(rank, "float32", shape))
    if is_async:
        manager.wait()
    for output, shape in zip(outputs, shapes, strict=True):
        assert torch.equal(output, torch.cat([value(each, "float32", shape) for each in range(size)]))
    parts = [torch.zeros(shape) for shape in shapes]
    with dist._coalescing_manager(async_ops=is_async) as manager:
        for part, output in zip(parts, outputs, strict=True):
            dist.reduce_scatter_tensor(part, output)
    if is_async:
        manager.wait()
    for part, shape in zip(parts, shapes, strict=True):
        assert torch.equal(part, size * value(rank, "float32", shape))


@pytest.mark.parametrize("op", ["SUM", "AVG"])
@pytest.mark.parametrize("is_async", [False, True])
@on("group")
def test_sparse_tensors(op: str, is_async: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def given(of: int) -> torch.Tensor:
        places = torch.arange(of + 1).unsqueeze(0)  # another number of entries on each rank
        return torch.sparse_coo_tensor(places, torch.full((of + 1, 2), of + 1.0), (5, 2), check_invariants=True)

    tensor = given(rank)
    work = dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op), async_op=is_async)
    if work is not None:
        assert work.wait()
        assert work.get_future().value()[0] is tensor  # DDP reads it there
    want = sum(given(each).to_dense() for each in range(size)) / (size if op == "AVG" else 1)
    assert torch.equal(tensor.to_dense(), want)
    with pytest.raises(NotImplementedError, match="of sparse tensors there are SUM and AVG"):
        dist.all_reduce(given(rank), op=dist.ReduceOp.MAX)


@on("group")
def test_objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * 1000 * rank})
    assert [each["rank"] for each in found] == list(range(size))
    objects = [f"from {rank}", rank]
    dist.broadcast_object_list(objects, src=size - 1)
    assert objects == [f"from {size - 1}", size - 1]


@on("group")
def test_futures_have_the_results_and_run_what_is_behind_them() -> None:
    size = dist.get_world_size()
    works = [dist.all_reduce(torch.full((3,), float(i)), async_op=True) for i in range(20)]
    futures = [work.get_future().then(lambda done: done.value()[0] * 2) for work in works]
    assert [future.wait()[0].item() for future in futures] == [2.0 * i * size for i in range(20)]
    assert [work.result()[0][0].item() for work in works] == [float(i * size) for i in range(20)]
    # What is put behind may begin and await operations itself.
    chained = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda done: again(done.value()[0]))
    assert chained.wait().item() == size * size
    nested = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda done: later(done.value()[0]))
    assert nested.wait().item() == size * size
    assert dist.barrier(async_op=True).get_future().wait() == []


def again(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


def later(tensor: torch.Tensor) -> torch.Tensor:
    """As hooks such as PowerSGD's, waits for a future inside what is behind another."""
    found: list[torch.Tensor] = dist.all_reduce(tensor, async_op=True).get_future().wait()
    return found[0]


@on("group2")
def test_what_does_not_fit_is_refused_before_it_is_begun() -> None:
    with pytest.raises(ValueError, match=r"all_gather: the group has 2 ranks, and the list 1 items"):
        dist.all_gather([torch.ones(1)], torch.ones(1))
    with pytest.raises(ValueError, match=r"in a group of 2 ranks, \[3\] torch.float32 is not 2 times \[2\]"):
        dist.all_gather_into_tensor(torch.ones(3), torch.ones(2))
    with pytest.raises(ValueError, match=r"5 rows of the input are no multiple of 2 ranks"):
        dist.all_to_all_single(torch.ones(4), torch.ones(5))
    with pytest.raises(ValueError, match=r"input splits \[1, 1\] are not one number of rows"):
        dist.all_to_all_single(torch.ones(4), torch.ones(4), [2, 2], [1, 1])
    with pytest.raises(ValueError, match=r"send: tag 2147483648; tags are 0 to 2147483647"):
        dist.send(torch.ones(1), 1 - dist.get_rank(), tag=2**31)
    with pytest.raises(ValueError, match=r"recv: tag 2147483648; tags are 0 to 2147483647"):
        dist.recv(torch.ones(1), tag=2**31)
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match=r"scatter: \[2\] torch.float32 and \[3\] torch.float32 must be alike"):
            dist.scatter(torch.ones(3), [torch.ones(2)] * 2)
    dist.barrier()


@on("group2")
def test_works_that_nobody_waits_for_keep_their_memory() -> None:
    for i in range(50):
        dist.all_reduce(torch.full((1000,), float(i)), async_op=True)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((1000,), 2.0))
