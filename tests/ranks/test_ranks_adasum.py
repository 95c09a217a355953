"""``op=hvd.Adasum`` between real processes: all forms of allreduce, against a float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adasum_oracle import adasum, tolerance
from rank_pool import on

import horo.torch as hvd
from horo.errors import UnsupportedError

DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 52}


def _vectors(count: int, dtype: torch.dtype, ranks: list[int] | None = None, seed: int = 0) -> list[torch.Tensor]:
    """Of each rank, with a part in common."""
    numbers = range(hvd.size()) if ranks is None else ranks
    made = [torch.Generator().manual_seed(1000 * seed + number) for number in (999, *numbers)]
    common, *own = (torch.randn(count, generator=generator, dtype=torch.float64) for generator in made)
    return [(common + each).to(dtype) for each in own]


def _check(result: torch.Tensor, vectors: list[torch.Tensor], digits: int = 0, scale: float = 1.0) -> None:
    arrays = [np.array(vector.tolist()) for vector in vectors]  # lists: torch before 2.3 knows no array of numpy 2
    wanted = torch.tensor(adasum(arrays).tolist(), dtype=torch.float64) * scale
    assert result.dtype == vectors[0].dtype
    allowed = tolerance(arrays, digits or DIGITS[result.dtype]) * abs(scale)
    torch.testing.assert_close(result.double().flatten(), wanted, rtol=0, atol=allowed)


@pytest.mark.parametrize("dtype", DIGITS, ids=str)
@on("ranks")
def test_all_forms_agree_with_the_reference(dtype: torch.dtype) -> None:
    for count in (0, 1, 7, 5000):
        vectors = _vectors(count, dtype)
        mine = vectors[hvd.rank()]
        before = mine.clone()
        results = [hvd.allreduce(mine, op=hvd.Adasum, name=f"named{count}") for _ in range(2)]
        results.append(hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Adasum)))
        results.append(hvd.allreduce_(mine.clone(), op=hvd.Adasum))
        results.append(hvd.synchronize(hvd.allreduce_async_(mine.clone(), op=hvd.Adasum)))
        assert torch.equal(mine, before)
        _check(results[0], vectors)
        for result in results:
            assert torch.equal(result, results[0])
        everybody = hvd.allgather_object(results[0].tolist())
        assert all(told == everybody[0] for told in everybody)
        scaled = hvd.allreduce(mine, op=hvd.Adasum, prescale_factor=0.5, postscale_factor=-4.0)
        _check(scaled, vectors, scale=-2.0)


@on("ranks")
def test_each_tensor_of_a_group_by_itself() -> None:
    kinds = [(3, torch.float32), (700, torch.float64), (1, torch.float32), (5001, torch.bfloat16)]
    vectors = [_vectors(count, dtype, seed=i) for i, (count, dtype) in enumerate(kinds)]
    mine = [each[hvd.rank()] for each in vectors]
    for results in (
        hvd.grouped_allreduce(mine, op=hvd.Adasum),
        hvd.synchronize(hvd.grouped_allreduce_async(mine, op=hvd.Adasum)),
        hvd.grouped_allreduce_([tensor.clone() for tensor in mine], op=hvd.Adasum),
    ):
        for result, each in zip(results, vectors, strict=True):
            _check(result, each)


@on("ranks")
def test_members_of_a_process_set() -> None:
    members = list(range(1, hvd.size()))
    part = hvd.add_process_set(members)
    if hvd.rank() in members:
        vectors = _vectors(900, torch.float32, members)
        mine = vectors[members.index(hvd.rank())]
        _check(hvd.allreduce(mine, op=hvd.Adasum, process_set=part), vectors)
    hvd.barrier()
    hvd.remove_process_set(part)


@on("ranks2")
def test_what_it_is_not_for_is_said() -> None:
    with pytest.raises(UnsupportedError, match=r"this op is not offered for int64"):
        hvd.allreduce(torch.ones(3, dtype=torch.int64), op=hvd.Adasum)
    with pytest.raises(UnsupportedError, match=r"allreduce 'x': op=Adasum has no gradient; call it on"):
        hvd.allreduce(torch.ones(3, requires_grad=True), op=hvd.Adasum, name="x")
    assert hvd.allreduce(torch.ones(3), op=hvd.Adasum).tolist() == [1, 1, 1]
