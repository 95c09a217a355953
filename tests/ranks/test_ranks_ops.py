"""Collectives between real processes: known answers for every operation, form and dtype that torch has."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import wait_until
from rank_pool import on, on_own
from torch.distributed import ReduceOp

import horo.torch as hvd

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *INTEGERS, torch.bool]


def _values(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (3, 5)) -> torch.Tensor:
    """Small whole numbers, so that every dtype computes exactly; different on every rank."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count).reshape(shape) + 3 * rank) % 4 + 1).to(dtype)


@on("ranks")
def test_ranks_are_numbered_on_one_host() -> None:
    assert hvd.is_initialized()
    assert hvd.is_homogeneous()
    own = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    n = hvd.global_process_set.size()
    assert hvd.allgather_object(own) == [[rank, n, rank, n, 0, 1] for rank in range(n)]
    assert (hvd.global_process_set.ranks, hvd.global_process_set.rank()) == (list(range(n)), hvd.rank())


def _expected(op: int, dtype: torch.dtype) -> torch.Tensor:
    stacked = torch.stack([_values(rank, dtype).double() for rank in range(hvd.size())])
    names = {hvd.Sum: "sum", hvd.Average: "mean", hvd.Min: "amin", hvd.Max: "amax", hvd.Product: "prod"}
    result = getattr(stacked, names[op])(0)
    return (result if dtype.is_floating_point else result.trunc()).to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@on("ranks")
def test_allreduce_gives_the_known_answer_for_every_op(dtype: torch.dtype) -> None:
    for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product):
        if dtype in (torch.uint8, torch.int8) and op == hvd.Product and hvd.size() == 4:
            continue  # 4 * 4 * 4 * 4 does not fit
        tensor = _values(hvd.rank(), dtype)
        before = tensor.clone()
        result = hvd.allreduce(tensor, op=op)
        assert result.dtype == dtype
        assert torch.equal(tensor, before)
        torch.testing.assert_close(result, _expected(op, dtype), rtol=0, atol=0)
        assert hvd.allreduce_(tensor, op=op) is tensor
        assert torch.equal(tensor, result)


@on("ranks2")
def test_reductions_of_torch_are_taken_by_their_names() -> None:
    own, group = torch.full((2,), float(hvd.rank() + 1)), [torch.full((2,), float(hvd.rank() + 1))]
    sparse = own.to_sparse()
    for number in range(6):
        hvd.allreduce(own, op=hvd.ReduceOp(number))  # as later calls may be repeated
    for name, wanted in (("SUM", 3.0), ("AVG", 1.5), ("PRODUCT", 2.0), ("MIN", 1.0), ("MAX", 2.0)):
        op: Any = getattr(ReduceOp, name)
        for each in (op, ReduceOp(op)):
            assert hvd.allreduce(own, op=each).tolist() == [wanted] * 2
            assert hvd.synchronize(hvd.allreduce_async_(own.clone(), op=each)).tolist() == [wanted] * 2
            assert hvd.grouped_allreduce(group, op=each)[0].tolist() == [wanted] * 2
            assert hvd.reducescatter(own, op=each).tolist() == [wanted]
    for op, wanted in ((ReduceOp.SUM, 3.0), (ReduceOp.AVG, 1.5)):
        assert hvd.sparse_allreduce_async(sparse, op=op)().to_dense().tolist() == [wanted] * 2
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=op)
        (weight * own).sum().backward()
        assert weight.grad.tolist() == [wanted] * 2
        assert optimizer.op is (hvd.Sum if op == ReduceOp.SUM else hvd.Average)


@on("ranks2")
def test_bool_reduces_as_and_or() -> None:
    own = torch.tensor([[False, False, True, True], [False, True, False, True]][hvd.rank()])
    either, both = [False, True, True, True], [False, False, False, True]
    for op, expected in ((hvd.Sum, either), (hvd.Max, either), (hvd.Min, both), (hvd.Product, both)):
        assert hvd.allreduce(own, op=op).tolist() == expected


@on("ranks2")
def test_a_rank_with_other_strides_is_combined_by_position() -> None:
    own = torch.arange(12.0).reshape(3, 4)
    if hvd.rank() == 1:
        own = own.t().contiguous().t()
    assert torch.equal(hvd.allreduce(own), torch.arange(12.0).reshape(3, 4))


@on("ranks")
def test_poll_is_false_before_the_other_ranks_have_come() -> None:
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(3), name="late")
        assert [hvd.poll(handle) for _ in range(3)] == [False] * 3
    hvd.broadcast_object("go on", root_rank=0)  # the others come to their part only now
    if hvd.rank() > 0:
        handle = hvd.allreduce_async(torch.ones(3), name="late")
    hvd.synchronize(handle)


@on("ranks")
def test_groups_mix_dtypes_and_shapes() -> None:
    n, r = hvd.size(), hvd.rank()
    tensors = [_values(r, dtype, (2, i + 1)) for i, dtype in enumerate([*FLOATS, torch.int64])]
    expected = [sum(_values(k, t.dtype, tuple(t.shape)) for k in range(n)) for t in tensors]
    given = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="mixed")
    waited_for = hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum))
    assert (type(given), type(waited_for)) == (list, tuple)
    for result, other, wanted in zip(given, waited_for, expected, strict=True):
        assert torch.equal(result, wanted)
        assert torch.equal(other, wanted)
    in_place = hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    for tensor, result, wanted in zip(tensors, in_place, expected, strict=True):
        assert result is tensor
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on("ranks")
def test_allgather_concatenates_different_numbers_of_rows(dtype: torch.dtype) -> None:
    n, r = hvd.size(), hvd.rank()
    for rows in ([k + 1 for k in range(n)], [2] * n, [0] * n, [0] * (n - 1) + [3]):
        parts = [_values(k, dtype, (rows[k], 3)) for k in range(n)]
        assert torch.equal(hvd.allgather(parts[r]), torch.cat(parts))
    result = hvd.allgather(parts[r], name="again")
    result.add_(1) if dtype != torch.bool else result.logical_not_()
    handle = hvd.grouped_allgather_async([parts[r], torch.full((1, 1), r)])
    first, second = hvd.synchronize(handle)
    assert torch.equal(first, torch.cat(parts))
    assert second.flatten().tolist() == list(range(n))


@on_own(4, ranks_per_host=2)
def test_no_rank_leaves_a_barrier_of_several_hosts_before_the_last_has_come(tmp_path: Path) -> None:
    """Whichever it is: the first one of the job, of another host, or of one that hears of it through a third."""

    def come(late: int) -> int:
        return len([*tmp_path.glob(f"{late} *")])

    for late in range(hvd.size()):
        if hvd.rank() == late:
            wait_until(lambda late=late: come(late) == 3, "the others come", deadline_s=60)
        (tmp_path / f"{late} {hvd.rank()}").touch()
        hvd.barrier()
        assert come(late) == 4


@on("ranks")
def test_compressed_results_are_the_same_bits_everywhere_and_those_of_16_bit_tensors() -> None:
    """Rounded, reduced and widened: as if the tensors had been of that dtype, to the last bit."""
    generator = torch.Generator().manual_seed(hvd.rank())
    for compression, dtype in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
        for count in (3, 5000, 400_001):
            for wide in (torch.float32, torch.float64):
                own = torch.randn(count, generator=generator, dtype=wide)
                kept = own.clone()
                result = hvd.allreduce(own, compression=compression)
                assert torch.equal(own, kept)
                assert torch.equal(result, hvd.allreduce(own.to(dtype)).to(wide))
                bits = result.view(torch.uint8)
                assert all(torch.equal(bits, other) for other in hvd.allgather(bits[None]))


NAMES = [
    "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64",
    "uint16 uint32 uint64 complex32 complex64 complex128 bits8 bits16 bits1x8 bits2x4 bits4x2",
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2",
]
ALL_DTYPES = [getattr(torch, name) for names in NAMES for name in names.split() if hasattr(torch, name)]


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
    for dtype in ALL_DTYPES:
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
    state = {str(dtype): _filled(dtype, 2, hvd.rank()) for dtype in ALL_DTYPES}
    hvd.broadcast_parameters(state, 1)
    for dtype in ALL_DTYPES:
        assert _bits(state[str(dtype)]) == _bits(_filled(dtype, 2, 1))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    if hvd.rank() == 1:
        optimizer.state[optimizer.param_groups[0]["params"][0]] = {str(d): _filled(d, 2, 1) for d in ALL_DTYPES}
    hvd.broadcast_optimizer_state(optimizer, 1)
    came = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert {key: _bits(value) for key, value in came.items()} == {str(d): _bits(_filled(d, 2, 1)) for d in ALL_DTYPES}
    odd = torch.ones(2).to(torch.float8_e5m2)
    assert hvd.broadcast_object(odd, 0).dtype is torch.float8_e5m2


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
@on("ranks")
def test_complex_numbers_are_added_averaged_and_multiplied(dtype: torch.dtype) -> None:
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
    factors, product = torch.tensor([1j, 1 - 1j]).to(dtype), torch.tensor([1j**n, (1 - 1j) ** n])
    for result in (hvd.allreduce(factors, op=hvd.Product), *hvd.grouped_allreduce([factors], op=hvd.Product)):
        assert torch.equal(result.to(total.dtype), product)
    assert hvd.reducescatter(factors, op=hvd.Product).tolist() == torch.tensor_split(product, n)[r].tolist()
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
