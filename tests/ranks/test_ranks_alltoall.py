"""``hvd.alltoall`` between real processes: known answers, gradients, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rank_pool import on

import horo.torch as hvd
from horo.errors import MismatchError

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.bfloat16,
    torch.float32,
    torch.complex64,
    torch.complex128,
    *(getattr(torch, name) for name in ("uint16", "uint32", "uint64", "float8_e4m3fn") if hasattr(torch, name)),
]


def _rows(counts: list[int], first: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    """``counts[i]`` rows of a value for i."""
    parts = [torch.full((count, 3), (first + step * i) % 7, dtype=torch.float32) for i, count in enumerate(counts)]
    return torch.cat(parts).to(dtype)  # torch 2.1 concatenates no float8


def _counts(size: int, step: int) -> list[list[int]]:
    return [[(s + 2 * d + step) % 4 * (1 + 300 * (step % 2)) for d in range(size)] for s in range(size)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on("ranks")
def test_each_gets_its_rows_from_all_in_their_order(dtype: torch.dtype) -> None:
    r, n = hvd.rank(), hvd.size()
    for step in range(4):
        counts = _counts(n, step)
        given = _rows(counts[r], 2 * r, 1, dtype)  # of 2 * origin + destination
        wanted = _rows([counts[s][r] for s in range(n)], r, 2, dtype)
        received = torch.tensor([counts[s][r] for s in range(n)], dtype=torch.int32)
        for splits in (counts[r], torch.tensor(counts[r], dtype=torch.int32)):
            got, rows = hvd.alltoall(given, splits)
            assert got.dtype == dtype and rows.dtype == torch.int32
            assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
            assert torch.equal(rows, received)


@on("ranks2")
def test_forms_and_names() -> None:
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
def test_what_is_wrong_is_said() -> None:
    x = torch.ones(3, 2)
    for splits, said in [
        ([1, 1, 1], r"alltoall: 3 splits; 2 ranks take part"),
        ([4, -1], r"alltoall: split -1 is negative"),
        ([2, 2], r"alltoall: the splits are 4 rows together; the tensor has 3"),
        ([1, 1.5], r"alltoall: split 1\.5 is no integer"),
        ([True, 1], r"alltoall: split True is no integer"),
        (np.ones(2), r"alltoall: split .*1\.0.* is no integer"),
        (3, r"alltoall: splits is 3; it must be one integer for each rank, as a list"),
        (torch.ones(2), r"alltoall: splits is torch\.float32 \[2\]; it must be a 1-D tensor of integers"),
        (torch.ones(2, 1, dtype=torch.int32), r"alltoall: splits is torch\.int32 \[2, 1\]"),
        (None, r"alltoall: 3 rows cannot be split evenly among 2 ranks; pass splits"),
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
