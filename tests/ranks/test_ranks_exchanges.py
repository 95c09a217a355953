"""``alltoall``, ``reducescatter`` and ``sparse_allreduce_async``: answers, gradients, refusals; results in ``out=``."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import on

import horo.torch as hvd
from horo.errors import MismatchError, UnsupportedError, UsageError


@on("ranks2")
def test_forms_and_names_of_alltoall() -> None:
    r = hvd.rank()
    even = torch.tensor([[10.0 * r], [10.0 * r + 1]])
    assert hvd.alltoall(even).tolist() == [[r], [10.0 + r]]
    got, rows = hvd.synchronize(hvd.alltoall_async(even, name="n"))
    assert got.tolist() == [[r], [10.0 + r]] and rows.tolist() == [1, 1]
    handle = hvd.alltoall_async(torch.arange(5) + 10 * r, splits=[1, 3])  # the last row goes to nobody
    got, rows = hvd.synchronize(handle)
    assert got.tolist() == ([0, 10] if r == 0 else [1, 2, 3, 11, 12, 13])
    assert rows.tolist() == ([1, 1] if r == 0 else [3, 3])
    got, rows = hvd.alltoall(torch.ones(0, 4), [0, 0])
    assert got.shape == (0, 4) and rows.tolist() == [0, 0]
    turned = torch.arange(6.0).reshape(2, 3).t()
    got, _ = hvd.alltoall(turned, [2, 1], name="turned")
    assert got.tolist() == ([[0, 3], [1, 4]] * 2 if r == 0 else [[2, 5]] * 2)
    conjugated, _ = hvd.alltoall(torch.tensor([1 + 2j, 3 - 1j]).conj(), [1, 1])
    assert conjugated.tolist() == [[1 - 2j, 3 + 1j][r]] * 2


@on("ranks2")
def test_what_is_wrong_with_an_alltoall_is_named() -> None:
    x = torch.ones(3, 2)
    for splits, said in [
        ([4, -1], r"alltoall: split -1 is negative"),
        ([2, 2], r"alltoall: the splits are 4 rows together; the tensor has 3"),
        ([1, 1.5], r"alltoall: split 1\.5 is no integer"),
        ([True, 1], r"alltoall: split True is no integer"),
        (np.ones(2), r"alltoall: split .*1\.0.* is no integer"),
        (3, r"alltoall: splits is 3; it must be one integer for each rank, as a list"),
        (torch.ones(2, 1, dtype=torch.int32), r"alltoall: splits is torch\.int32 \[2, 1\]"),
    ]:
        with pytest.raises(ValueError, match=said):
            hvd.alltoall(x, splits)
    with pytest.raises(ValueError, match=r"alltoall: a scalar has no first dimension to split along"):
        hvd.alltoall(torch.tensor(1))
    with pytest.raises(ValueError, match=r"alltoall 'n': expected a torch.Tensor, not list"):
        hvd.alltoall([1, 2], name="n")
    with pytest.raises(MismatchError, match=r"alltoall.* rank 0 .* float32 \[\*, 2\], rank 1 .* float32 \[\*, 3\]"):
        hvd.alltoall(torch.ones(2, 2 + hvd.rank()))
    assert hvd.alltoall(torch.ones(2)).tolist() == [1, 1]


@on("ranks")
def test_gradients_go_back_to_where_the_rows_came_from() -> None:
    r, n = hvd.rank(), hvd.size()
    splits = [(r + d) % 3 for d in range(n)]
    x = torch.arange(2.0 * sum(splits) + 2).reshape(-1, 2).requires_grad_()  # the last row goes to nobody
    for _ in range(2):
        x.grad = None
        got, _ = hvd.alltoall(x, splits, name="g")
        (got * (r + 1)).sum().backward()
        factors = [d + 1.0 for d in range(n) for _ in range(splits[d])] + [0.0]
        assert x.grad.tolist() == [[factor, factor] for factor in factors]


@on("ranks2")
def test_it_can_be_differentiated_twice() -> None:
    r = hvd.rank()
    x = torch.tensor([1.0 + r, 2.0 + r], requires_grad=True)
    got = hvd.alltoall(x)
    assert isinstance(got, torch.Tensor)
    (first,) = torch.autograd.grad(got.pow(3).sum(), x, create_graph=True)
    assert first.tolist() == [3 * (1.0 + r) ** 2, 3 * (2.0 + r) ** 2]
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [6 * (1.0 + r), 6 * (2.0 + r)]


@on("ranks2")
def test_forms_names_and_factors_of_reducescatter() -> None:
    r = hvd.rank()
    x = torch.full((5, 2), r + 1.0)
    rows = 3 - r
    for _ in range(3):  # again from the cache of requests
        assert torch.equal(hvd.reducescatter(x), torch.full((rows, 2), 1.5))
        assert torch.equal(hvd.reducescatter(x, "n", op=hvd.Sum), torch.full((rows, 2), 3.0))
        scaled = hvd.reducescatter(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        assert torch.equal(scaled, torch.full((rows, 2), 6.0))
        one, two = hvd.grouped_reducescatter([x, torch.ones(4, dtype=torch.int32)], op=hvd.Sum)
        assert torch.equal(one, torch.full((rows, 2), 3.0)) and two.tolist() == [2, 2]
    handle = hvd.reducescatter_async(x, op=hvd.Max)
    group = hvd.grouped_reducescatter_async([x, x[:2]], op=hvd.Min)
    assert torch.equal(hvd.synchronize(handle), torch.full((rows, 2), 2.0))
    least = hvd.synchronize(group)
    assert isinstance(least, tuple)
    assert [tuple(part.shape) for part in least] == [(rows, 2), (1, 2)]
    assert torch.equal(hvd.reducescatter(x.t().contiguous().t(), op=hvd.Sum), torch.full((rows, 2), 3.0))
    rounded = hvd.reducescatter(torch.full((2,), 1 + 2.0**-9), compression=hvd.Compression.bf16)
    assert rounded.dtype == torch.float32 and rounded.item() == 1.0


@on("ranks2")
def test_what_is_wrong_with_a_reducescatter_is_named() -> None:
    for form in (hvd.reducescatter, hvd.reducescatter_async):
        with pytest.raises(UnsupportedError, match=r"op Adasum is offered by allreduce only") as caught:
            form(torch.ones(2), op=hvd.Adasum)
        assert isinstance(caught.value, hvd.HorovodInternalError)  # as Horovod has it
    told = r"rank 0 .* has refused it: .*op Adasum is offered" if hvd.rank() else "op Adasum is offered"
    with pytest.raises(UnsupportedError, match=told):
        hvd.grouped_reducescatter([torch.ones(2)], op=hvd.Sum if hvd.rank() else hvd.Adasum)
    with pytest.raises(MismatchError, match=r"rank 0 .* float32 \[2\], rank 1 .* float32 \[3\]"):
        hvd.reducescatter(torch.ones(2 + hvd.rank()), name="rows")
    assert hvd.reducescatter(torch.ones(2), op=hvd.Sum).item() == 2


@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.5, 3.0)], ids=str)
@pytest.mark.parametrize("op", ["Sum", "Average", "Min", "Max", "Product"])
@on("ranks")
def test_with_allgather_it_has_the_gradient_of_allreduce(op: str, factors: tuple[float, float]) -> None:
    number = getattr(hvd, op)
    scales = {"prescale_factor": factors[0], "postscale_factor": factors[1]}
    values = torch.tensor([[1.0, 0.0], [2.0, float(hvd.rank())], [-1.0 - hvd.rank(), 3.0]], dtype=torch.float64)
    weights = torch.arange(6, dtype=torch.float64).reshape(3, 2) + hvd.rank()
    apart, whole = values.clone().requires_grad_(), values.clone().requires_grad_()
    gathered = hvd.allgather(hvd.reducescatter(apart, op=number, **scales))
    reduced = hvd.allreduce(whole, op=number, **scales)
    assert torch.equal(gathered, reduced)
    (gathered * weights).sum().backward()
    (reduced * weights).sum().backward()
    torch.testing.assert_close(apart.grad, whole.grad)


def _own(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows 0 and ``rank + 1``; rank 1 gives none."""
    r = hvd.rank()
    rows = [] if r == 1 else [0, r + 1]
    values = torch.full((len(rows), 2), r + 1).to(dtype)
    return torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64), values, (hvd.size() + 1, 2), check_invariants=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
@on("ranks")
def test_it_is_the_allreduce_of_the_dense_tensors(dtype: torch.dtype) -> None:
    tensor = _own(dtype)
    for op in (hvd.Sum, hvd.Average):
        begun = [hvd.sparse_allreduce_async(tensor, f"x{index}", op) for index in range(3)]
        unnamed = hvd.sparse_allreduce_async(tensor, op=op)
        for complete in (*reversed(begun), unnamed):
            result = complete()
            assert result.layout is torch.sparse_coo and result.dtype == dtype
            if dtype.is_floating_point or op == hvd.Sum:
                wanted = hvd.allreduce(tensor.to_dense(), op=op)
                rtol = 1e-2 if dtype == torch.bfloat16 else 1e-6
                torch.testing.assert_close(result.to_dense(), wanted, rtol=rtol, atol=0)
    with pytest.raises(UsageError):
        unnamed()


@on("ranks2")
def test_sets_of_ranks_and_several_sparse_dimensions() -> None:
    point = torch.sparse_coo_tensor([[1], [hvd.rank()]], [2.0], (2, 2), check_invariants=True)
    assert hvd.sparse_allreduce_async(point, "p", hvd.Average)().to_dense().tolist() == [[0, 0], [1, 1]]
    alone = hvd.add_process_set([1])
    if hvd.rank() == 1:
        assert torch.equal(hvd.sparse_allreduce_async(point, "p", hvd.Average, alone)().to_dense(), point.to_dense())
    hvd.remove_process_set(alone)


@on("ranks2")
def test_what_is_wrong_with_sparse_tensors_is_named() -> None:
    told = "sparse_allreduce 'x': expected a sparse tensor in COO form, not a tensor with"
    with pytest.raises(UsageError, match=told):
        hvd.sparse_allreduce_async(torch.ones(2), "x", hvd.Sum)
    with pytest.raises(UsageError, match="not 3"):
        hvd.sparse_allreduce_async(3, "x", hvd.Sum)
    with pytest.raises(UnsupportedError, match="neither Average nor Sum"):
        hvd.sparse_allreduce_async(_own(), "x", hvd.Max)
    other = torch.sparse_coo_tensor([[0]], [1.0], (2 + hvd.rank(),), check_invariants=True)
    told = r"rank 0 gave a tensor of shape \[2\] with 1 sparse dimensions, rank 1 one of shape \[3\]"
    with pytest.raises(MismatchError, match=told):
        hvd.sparse_allreduce_async(other, "x", hvd.Sum)()
    deep = torch.sparse_coo_tensor([[0]] * (1 + hvd.rank()), [1.0], (2,) * (1 + hvd.rank()), check_invariants=True)
    with pytest.raises(MismatchError):
        hvd.sparse_allreduce_async(deep, "x", hvd.Sum)()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0


@on("ranks")
@pytest.mark.parametrize("elements", [3, 1 << 19])
def test_each_call_writes_to_its_out_and_no_other(elements: int) -> None:
    """The first calls copy, later ones give the core the memory itself; half a million elements exceed 4 MiB."""
    r, n = hvd.rank(), hvd.size()
    base = torch.arange(float(elements))
    outs = [torch.full((n, elements), -1.0) for _ in range(2)]
    for turn in range(8):
        mine, other = outs[turn % 2], outs[1 - turn % 2].clone()
        rows = torch.stack([base + 10 * turn + 100 * r + s for s in range(n)])
        before = mine._version
        assert hvd.allgather(rows[:1].contiguous(), name="g", out=mine) is mine
        assert mine._version > before
        assert torch.equal(mine, torch.stack([base + 10 * turn + 100 * s for s in range(n)]))
        assert hvd.alltoall(rows, name="a", out=mine) is mine
        assert torch.equal(mine, torch.stack([base + 10 * turn + 100 * s + r for s in range(n)]))
        assert hvd.broadcast(rows, n - 1, name="b", out=mine) is mine
        assert torch.equal(mine, torch.stack([base + 10 * turn + 100 * (n - 1) + s for s in range(n)]))
        assert hvd.reducescatter(rows, name="s", op=hvd.Max, out=mine[:1]).data_ptr() == mine.data_ptr()
        assert torch.equal(mine[0], base + 10 * turn + 100 * (n - 1) + r)
        assert torch.equal(outs[1 - turn % 2], other)
        assert torch.equal(rows[0], base + 10 * turn + 100 * r)


@on("ranks2")
def test_an_out_that_overlaps_the_tensor_gets_the_result_all_the_same() -> None:
    for turn in range(6):
        memory = torch.arange(6.0) + 10 * hvd.rank() + turn
        hvd.allgather(memory[1:4], name="g", out=memory)
        assert memory.tolist() == [value + turn for value in (1.0, 2.0, 3.0, 11.0, 12.0, 13.0)]
        memory = torch.arange(4.0) + 10 * hvd.rank() + turn
        hvd.alltoall(memory, name="a", out=memory)
        first = 2 * hvd.rank() + turn
        assert memory.tolist() == [first, first + 1, first + 10, first + 11]


@on("ranks2")
def test_rows_that_do_not_fit_are_refused_where_they_do_not() -> None:
    """Rank 1 gives one row more in each third call: only ranks whose memory is too small get the error."""
    for turn in range(9):
        rows = torch.full((2 if turn % 3 == 2 and hvd.rank() == 1 else 1, 2), float(turn))
        out = torch.zeros(3 if hvd.rank() == 1 and turn % 3 == 2 else 2, 2)
        if turn % 3 == 2 and hvd.rank() == 0:
            told = re.escape("allgather 'g': out has the shape [2, 2], the result [3")
            with pytest.raises(hvd.UsageError, match=told):
                hvd.allgather(rows, name="g", out=out)
        else:
            assert hvd.allgather(rows, name="g", out=out).tolist() == [[float(turn)] * 2] * out.shape[0]


@on("ranks2")
def test_splits_and_other_forms_go_to_out_too() -> None:
    r = hvd.rank()
    out = torch.zeros(3, dtype=torch.int64)
    for _ in range(3):
        got, counts = hvd.alltoall(torch.tensor([r, r, r]), [r + 1, 2 - r], name="uneven", out=out)
        assert (got.data_ptr(), counts.tolist()) == (out.data_ptr(), [1, 2] if r == 0 else [2, 1])
        assert got.tolist() == ([0, 1, 1] if r == 0 else [0, 0, 1])
    half = torch.zeros(1, 4)
    for _ in range(3):
        strided = torch.arange(8.0).reshape(4, 2).t()
        hvd.reducescatter(strided, compression=hvd.Compression.fp16, op=hvd.Sum, name="half", out=half)
        assert half.tolist() == [[4.0 * value + 2 * r for value in range(4)]]
    with torch.no_grad():
        leaf = torch.ones(2, requires_grad=True)
        assert hvd.broadcast(leaf, 0, out=torch.zeros(2)).tolist() == [1.0, 1.0]


@on("ranks2")
@pytest.mark.parametrize("is_within", [False, True])
def test_memory_of_inference_mode_and_other_memory_get_the_result(is_within: bool) -> None:
    with torch.inference_mode():
        inferred = torch.zeros(2)
    for out in (inferred, torch.zeros(2)):
        with torch.inference_mode(is_within):
            for turn in range(3):
                version = None if out.is_inference() else out._version
                assert hvd.broadcast(torch.full((2,), float(turn)), 0, name="b", out=out) is out
                assert out.tolist() == [float(turn)] * 2
                assert version is None or out._version > version


CALLS: dict[str, Callable[..., Any]] = {
    "allgather": lambda tensor, out: hvd.allgather(tensor, name="x-1", out=out),
    "alltoall": lambda tensor, out: hvd.alltoall(tensor, name="x-1", out=out),
    "broadcast": lambda tensor, out: hvd.broadcast(tensor, 0, name="x-1", out=out),
    "reducescatter": lambda tensor, out: hvd.reducescatter(tensor, name="x-1", out=out),
}


@on("ranks2")
@pytest.mark.parametrize("kind", CALLS)
def test_an_out_that_will_not_do_is_refused_on_all_ranks(kind: str) -> None:
    rows, leaf = torch.ones(2, 4), torch.ones(2, 4, requires_grad=True)
    without_memory = torch.ones(2, 4)
    without_memory.untyped_storage().resize_(0)
    wrong_shape = "[2, 5], the result " + {"reducescatter": "[1, 4]", "broadcast": "[2, 4]"}.get(kind, "[2, 4]")
    cases: list[tuple[torch.Tensor, Any, str]] = [
        (rows, [0.0], f"out of {kind} 'x-1': expected a torch.Tensor, not list"),
        (rows, torch.ones(2, 4).to_sparse_csr(), f"out of {kind} 'x-1': torch.sparse_csr tensors are not supported"),
        (rows, torch.ones(2, 4).to_mkldnn(), "torch._mkldnn tensors are not supported"),
        (rows, torch.nested.nested_tensor([torch.ones(2)]), "nested tensors are not supported"),
        (rows, torch.nn.UninitializedParameter(requires_grad=False), f"out of {kind} 'x-1': "),
        (rows, without_memory, f"out of {kind} 'x-1': the tensor (Tensor) "),
        (rows, torch.ones(2, 4, dtype=torch.float64), "out is torch.float64 on cpu, the tensor torch.float32 on cpu"),
        (rows, torch.ones(2, 4, device="meta"), "the tensor is on meta"),
        (rows, torch.ones(4, 2).t(), "out is not contiguous (strides [1, 2]); use torch.empty"),
        (rows, torch.ones(2, 5), f"out has the shape {wrong_shape}"),
        (rows, torch.tensor(1.0), f"{kind} 'x-1': out has the shape [], the result ["),
        (leaf, torch.ones(2, 4), "out= has no gradient; leave it out, or call this in torch.no_grad()"),
        (rows, leaf, "out= has no gradient"),
    ]
    for tensor, out, sentence in cases:
        for wrong in range(2):
            if hvd.rank() == wrong:
                with pytest.raises(hvd.UsageError, match=re.escape(sentence)):
                    CALLS[kind](tensor, out)
            else:
                with pytest.raises(hvd.HoroError, match=re.escape(sentence)):
                    CALLS[kind](rows, torch.ones(*{"allgather": (4, 4), "reducescatter": (1, 4)}.get(kind, (2, 4))))
