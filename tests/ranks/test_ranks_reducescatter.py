"""``hvd.reducescatter`` between real processes: known answers, gradients, and what is refused."""

from __future__ import annotations

import pytest
import torch
from rank_pool import on

import horo.torch as hvd
from horo.errors import MismatchError, UnsupportedError


def _values(rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, so that every dtype computes exactly; different on every rank."""
    return ((torch.arange(rows * 3).reshape(rows, 3) + 3 * rank) % 4 + 1).to(dtype)


def _mine(whole: torch.Tensor) -> torch.Tensor:
    return torch.tensor_split(whole, hvd.size())[hvd.rank()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64], ids=str)
@on("ranks")
def test_it_gives_the_known_rows_for_every_op(dtype: torch.dtype) -> None:
    for rows in (0, 1, hvd.size(), 7, 1000):
        stacked = torch.stack([_values(rank, rows, dtype).double() for rank in range(hvd.size())])
        tensor = _values(hvd.rank(), rows, dtype)
        before = tensor.clone()
        answers = {hvd.Sum: stacked.sum(0), hvd.Average: stacked.mean(0)}
        answers |= {hvd.Min: stacked.amin(0), hvd.Max: stacked.amax(0)}
        for op, answer in answers.items():
            result = hvd.reducescatter(tensor, op=op)
            assert result.dtype == dtype
            wanted = _mine(answer if dtype.is_floating_point else answer.trunc()).to(dtype)
            torch.testing.assert_close(result, wanted, rtol=0, atol=0)
        assert torch.equal(tensor, before)


@on("ranks2")
def test_forms_names_and_factors() -> None:
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
def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ValueError, match=r"reducescatter: a scalar has no first dimension to split along"):
        hvd.reducescatter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"grouped_reducescatter: the list of tensors is empty"):
        hvd.grouped_reducescatter([])
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
