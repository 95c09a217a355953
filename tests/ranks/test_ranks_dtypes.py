"""Tensors of all dtypes that torch has: those that horo calculates with, and those that it only moves."""

from __future__ import annotations

import copy

import pytest
import torch
from rank_pool import RankPool

import horo.torch as hvd
from horo.errors import MismatchError

NAMES = [
    "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64",
    "uint16 uint32 uint64 complex32 complex64 complex128 bits8 bits16 bits1x8 bits2x4 bits4x2",
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2",
]
DTYPES = [getattr(torch, name) for names in NAMES for name in names.split() if hasattr(torch, name)]


def _filled(dtype: torch.dtype, rows: int, seed: int) -> torch.Tensor:
    """``[rows, 5]`` whose bytes depend on the seed and the place."""
    count = rows * 5 * dtype.itemsize
    values = (torch.arange(count) * 7 + 13 * seed) % 251
    if dtype is torch.bool:
        values %= 2
    return values.to(torch.uint8).view(dtype).view(rows, 5)


def _bits(tensor: torch.Tensor) -> list[int]:
    flat: list[int] = tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).tolist()
    return flat


def test_moving_operations_take_every_dtype_in_every_form(ranks: RankPool) -> None:
    def check() -> None:
        r, n = hvd.rank(), hvd.size()
        for dtype in DTYPES:
            mine, of_last = _filled(dtype, r + 1, r), _filled(dtype, 3, n - 1)
            everyone = [byte for rank in range(n) for byte in _bits(_filled(dtype, rank + 1, rank))]
            assert _bits(hvd.allgather(mine)) == everyone
            assert _bits(hvd.synchronize(hvd.allgather_async(mine, name="a"))) == everyone
            for gathered in hvd.grouped_allgather([mine, mine]):
                assert (gathered.dtype, _bits(gathered)) == (dtype, everyone)
            for _ in range(2):
                assert _bits(hvd.broadcast(_filled(dtype, 3, r), n - 1)) == _bits(of_last)
                for begin in (hvd.broadcast_async, hvd.broadcast_async_):
                    assert _bits(hvd.synchronize(begin(_filled(dtype, 3, r), n - 1))) == _bits(of_last)
                written = _filled(dtype, 3, r)
                assert hvd.broadcast_(written, n - 1, name="b") is written
                assert (written.dtype, _bits(written)) == (dtype, _bits(of_last))
            sent = _filled(dtype, n, r)
            wanted = [byte for rank in range(n) for byte in _bits(_filled(dtype, n, rank)[r : r + 1])]
            assert _bits(hvd.alltoall(sent)) == wanted
            got, rows = hvd.synchronize(hvd.alltoall_async(sent))
            assert (got.dtype, _bits(got), rows.tolist()) == (dtype, wanted, [1] * n)

    ranks.run(check)


def test_a_process_set_moves_them_too(ranks4: RankPool) -> None:
    def check() -> None:
        pair = hvd.add_process_set([1, 3])
        if pair.included():
            for dtype in DTYPES:
                got = hvd.allgather(_filled(dtype, 1, hvd.rank()), process_set=pair)
                assert _bits(got) == _bits(_filled(dtype, 1, 1)) + _bits(_filled(dtype, 1, 3))
                assert _bits(hvd.broadcast(_filled(dtype, 2, hvd.rank()), 3, process_set=pair)) == _bits(
                    _filled(dtype, 2, 3)
                )
        hvd.remove_process_set(pair)

    ranks4.run(check)


def test_dtypes_of_equal_size_are_told_apart(ranks2: RankPool) -> None:
    def check() -> None:
        own = [torch.complex64, torch.float64][hvd.rank()]
        with pytest.raises(MismatchError, match=r"complex64 \[2\].*float64 \[2\]"):
            hvd.broadcast(torch.ones(2, dtype=own), 0, name="told")

    ranks2.run(check)


def test_state_of_any_dtype_is_broadcast(ranks2: RankPool) -> None:
    def check() -> None:
        state = {str(dtype): _filled(dtype, 2, hvd.rank()) for dtype in DTYPES}
        hvd.broadcast_parameters(state, 1)
        for dtype in DTYPES:
            assert _bits(state[str(dtype)]) == _bits(_filled(dtype, 2, 1))
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        if hvd.rank() == 1:
            optimizer.state[optimizer.param_groups[0]["params"][0]] = {str(d): _filled(d, 2, 1) for d in DTYPES}
        hvd.broadcast_optimizer_state(optimizer, 1)
        came = optimizer.state[optimizer.param_groups[0]["params"][0]]
        assert {key: _bits(value) for key, value in came.items()} == {str(d): _bits(_filled(d, 2, 1)) for d in DTYPES}
        odd = torch.ones(2).to(torch.float8_e5m2)
        assert hvd.broadcast_object(odd, 0).dtype is torch.float8_e5m2

    ranks2.run(check)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_complex_numbers_are_added_and_averaged(ranks: RankPool, dtype: torch.dtype) -> None:
    def check(dtype: torch.dtype) -> None:
        r, n = hvd.rank(), hvd.size()
        own = torch.tensor([complex(r, 2 * r), complex(1, -r)] * 8).to(dtype)
        total = torch.tensor([complex(n * (n - 1) / 2, n * (n - 1)), complex(n, -n * (n - 1) / 2)] * 8)
        for _ in range(2):
            added = hvd.allreduce(own, op=hvd.Sum, name="sum")
            assert added.dtype == dtype
            assert torch.equal(added.to(total.dtype), total)
        averaged = hvd.synchronize(hvd.allreduce_async(own, op=hvd.Average, prescale_factor=float(n)))
        assert torch.equal(averaged.to(total.dtype), total)
        for group in hvd.grouped_allreduce([own, own], op=hvd.Sum):
            assert torch.equal(group.to(total.dtype), total)
        mine = hvd.reducescatter(own.view(-1, 1).expand(-1, n).contiguous().view(n, -1), op=hvd.Sum)
        assert mine.shape == (1, 16)
        written = own.clone()
        hvd.allreduce_(written, op=hvd.Sum)
        assert torch.equal(written.to(total.dtype), total)

    ranks.run(check, dtype)


def test_a_lazily_conjugated_tensor_is_what_it_shows(ranks2: RankPool) -> None:
    def check() -> None:
        own = torch.tensor([1 + 2j, 3 - 1j])
        for sent, first in ((own, 1 + 2j), (own.conj(), 1 - 2j), (own, 1 + 2j)):
            assert hvd.allreduce(sent, op=hvd.Sum, name="conj")[0].item() == 2 * first
            assert hvd.broadcast(sent, 0, name="conj")[0].item() == first
            assert hvd.allgather(sent)[2].item() == first
        base = own.clone()
        hvd.allreduce_(base.conj(), op=hvd.Sum)
        assert base.tolist() == [2 + 4j, 6 - 2j]

    ranks2.run(check)


def test_complex_gradients_are_those_of_one_process(ranks2: RankPool) -> None:
    def check() -> None:
        def make(scale: float) -> torch.Tensor:
            return (torch.tensor([1 + 2j, 3 - 1j]) * scale).requires_grad_()

        own, other = make(1.0 + hvd.rank()), make(2.0 - hvd.rank())
        (own + other).abs().pow(2).sum().backward()  # the sum of the losses of both ranks is twice that
        given = make(1.0 + hvd.rank())
        hvd.allreduce(given, op=hvd.Sum).abs().pow(2).sum().backward()
        assert own.grad is not None and given.grad is not None
        torch.testing.assert_close(given.grad, 2 * own.grad)
        parameter = torch.nn.Parameter(torch.tensor([1 + 1j, 2 - 1j]))
        alone = copy.deepcopy(parameter)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))
        plain = torch.optim.SGD([alone], lr=0.1)
        ((1 + hvd.rank()) * parameter).abs().pow(2).sum().backward()
        optimizer.step()
        (alone.abs().pow(2).sum() * 2.5).backward()  # the mean of 1 and 4
        plain.step()
        torch.testing.assert_close(parameter.detach(), alone.detach())

    ranks2.run(check)


def test_ranks_that_have_joined_add_nothing_to_complex_numbers(ranks2: RankPool) -> None:
    def check() -> None:
        if hvd.rank() == 0:
            own = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128)
            assert torch.equal(hvd.allreduce(own, op=hvd.Sum, name="joined"), own)
            rows = _filled(torch.complex64, 2, 0)
            assert _bits(hvd.allgather(rows, name="joined")) == _bits(rows)
        assert hvd.join() in (0, 1)

    ranks2.run(check)
