"""``hvd.sparse_allreduce_async`` between real processes."""

from __future__ import annotations

import pytest
import torch
from rank_pool import on

import horo.torch as hvd
from horo.errors import MismatchError, UnsupportedError, UsageError


def _own(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows 0 and ``rank + 1``; rank 1 gives none."""
    r = hvd.rank()
    rows = [] if r == 1 else [0, r + 1]
    values = torch.full((len(rows), 2), r + 1).to(dtype)
    return torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64), values, (hvd.size() + 1, 2), check_invariants=True
    )


def _dense(tensor: torch.Tensor, op: int) -> torch.Tensor:
    return hvd.allreduce(tensor.to_dense(), op=op)


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
                torch.testing.assert_close(
                    result.to_dense(), _dense(tensor, op), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0
                )
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
def test_what_is_wrong_is_said() -> None:
    with pytest.raises(
        UsageError, match="sparse_allreduce 'x': expected a sparse tensor in COO form, not a tensor with"
    ):
        hvd.sparse_allreduce_async(torch.ones(2), "x", hvd.Sum)
    with pytest.raises(UsageError, match="not 3"):
        hvd.sparse_allreduce_async(3, "x", hvd.Sum)
    with pytest.raises(UnsupportedError, match="neither Average nor Sum"):
        hvd.sparse_allreduce_async(_own(), "x", hvd.Max)
    other = torch.sparse_coo_tensor([[0]], [1.0], (2 + hvd.rank(),), check_invariants=True)
    with pytest.raises(
        MismatchError, match=r"rank 0 gave a tensor of shape \[2\] with 1 sparse dimensions, rank 1 one of shape \[3\]"
    ):
        hvd.sparse_allreduce_async(other, "x", hvd.Sum)()
    deep = torch.sparse_coo_tensor([[0]] * (1 + hvd.rank()), [1.0], (2,) * (1 + hvd.rank()), check_invariants=True)
    with pytest.raises(MismatchError):
        hvd.sparse_allreduce_async(deep, "x", hvd.Sum)()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
