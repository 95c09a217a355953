"""Tensors of all dtypes that torch has: those that horo calculates with, and those that it only moves."""

from __future__ import annotations

import copy

import pytest
import torch
from rank_pool import on

import horo.torch as hvd

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


@on("ranks")
def test_moving_operations_take_every_dtype_in_every_form() -> None:
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


@on("ranks2")
def test_state_of_any_dtype_is_broadcast() -> None:
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


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
@on("ranks")
def test_complex_numbers_are_added_and_averaged(dtype: torch.dtype) -> None:
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


@on("ranks2")
def test_a_lazily_conjugated_tensor_is_what_it_shows() -> None:
    own = torch.tensor([1 + 2j, 3 - 1j])
    for sent, first in ((own, 1 + 2j), (own.conj(), 1 - 2j), (own, 1 + 2j)):
        assert hvd.allreduce(sent, op=hvd.Sum, name="conj")[0].item() == 2 * first
        assert hvd.broadcast(sent, 0, name="conj")[0].item() == first
        assert hvd.allgather(sent)[2].item() == first
    base = own.clone()
    hvd.allreduce_(base.conj(), op=hvd.Sum)
    assert base.tolist() == [2 + 4j, 6 - 2j]


@on("ranks2")
def test_complex_gradients_are_those_of_one_process() -> None:
    def make(scale: float) -> torch.Tensor:
        return (torch.tensor([1 + 2j, 3 - 1j]) * scale).requires_grad_()

    own, other = make(1.0 + hvd.rank()), make(2.0 - hvd.rank())
    (own + other).abs().pow(2).sum().backward()  # the sum of the losses of both ranks is twice that
    given = make(1.0 + hvd.rank())
    hvd.allreduce(given, op=hvd.Sum).abs().pow(2).sum().backward()
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


# ---- torch's default device is not that of the tensors ----


@on("ranks2")
def test_results_are_where_their_tensors_are() -> None:
    """Memory on ``meta`` has no address. Calls that are repeated use what is kept of the first ones."""
    r, n = hvd.rank(), hvd.size()
    given = torch.arange(2.0 * n).reshape(n, 2) + r
    whole = given - r
    with torch.device("meta"):
        for turn in range(4):
            assert torch.equal(hvd.allreduce(given, op=hvd.Sum, name="sum"), whole * n + 1)
            (grouped,) = hvd.grouped_allreduce([given], op=hvd.Max, name=f"max{turn}")
            assert torch.equal(grouped, whole + 1)
            assert torch.equal(hvd.broadcast(given, 1, name="root"), whole + 1)
            assert torch.equal(hvd.allgather(given, name="rows"), torch.cat([whole, whole + 1]))
            assert hvd.allgather(given[:0], name="none").shape == (0, 2)
            assert torch.equal(hvd.alltoall(given, name="for all"), torch.stack([whole[r], whole[r] + 1]))
            assert torch.equal(hvd.reducescatter(given, op=hvd.Sum, name="share"), whole[r : r + 1] * n + 1)
            rows, counts = hvd.alltoall(given, splits=[1, 1], name="split")
            assert rows.tolist() == [whole[r].tolist(), (whole[r] + 1).tolist()]
            assert counts.tolist() == [1, 1]


@on("ranks2")
def test_what_travels_beside_tensors_is_in_host_memory() -> None:
    r = hvd.rank()
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()  # older torch makes Adam's state on the default device and cannot use it then
    with torch.device("meta"):
        assert hvd.broadcast_object({"rank": r}, 1) == {"rank": 1}
        assert hvd.allgather_object(r) == [0, 1]
        hvd.broadcast_parameters(model.state_dict(), 0)
        average = hvd.MetricAverage("loss")
        average.update(2, loss=r + 1.0)
        assert average.compute() == {"loss": 1.5}
        model(torch.ones(3, 2, device="cpu")).sum().backward()
        optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, 0)
    everyone = hvd.allgather(torch.cat([p.detach().reshape(-1) for p in model.parameters()])[None])
    assert torch.equal(everyone[0], everyone[1])
