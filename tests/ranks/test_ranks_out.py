"""Results in memory of the caller: ``out=`` of allgather, alltoall, broadcast and reducescatter."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import on

import horo.torch as hvd


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
