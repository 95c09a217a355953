"""Gradients of the collectives, by finite differences or torch's own, and ``SyncBatchNorm``: those of one process."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from rank_pool import on
from torch import nn

import horo.torch as hvd
from horo.errors import MismatchError, UnsupportedError, UsageError

Operation = Callable[[torch.Tensor], torch.Tensor]


def _input(rank: int, rows: int = 2) -> torch.Tensor:
    return torch.cos(torch.arange(rows * 3, dtype=torch.float64) * 1.3 + rank).reshape(rows, 3)


def _local_loss(operation: Operation, tensor: torch.Tensor) -> torch.Tensor:
    result = operation(tensor)
    weights = torch.sin(torch.arange(result.numel(), dtype=torch.float64) + 1.7 * hvd.rank())
    return (weights * result.flatten().pow(2)).sum()


def _check_gradient(operation: Operation, own: torch.Tensor, *, mean: bool) -> None:
    """Compares every partial derivative of every rank's input; all ranks vary one element of one rank at a time."""
    n, r = hvd.size(), hvd.rank()
    tensor = own.clone().requires_grad_()
    _local_loss(operation, tensor).backward()
    assert tensor.grad is not None
    step = 1e-6
    counts = hvd.allgather(torch.tensor([own.numel()])).tolist()
    for varied in range(n):
        for index in range(counts[varied]):
            values = []
            for sign in (1, -1):
                moved = own.clone()
                if varied == r:
                    moved.view(-1)[index] += sign * step
                with torch.no_grad():
                    loss = _local_loss(operation, moved)
                values.append(hvd.allreduce(loss, op=hvd.Average if mean else hvd.Sum).item())
            if varied == r:
                wanted = (values[0] - values[1]) / (2 * step)
                assert abs(tensor.grad.view(-1)[index].item() - wanted) < 1e-7 * max(1.0, abs(wanted)) + 1e-8


@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.5, 3.0)], ids=str)
@pytest.mark.parametrize("op", ["Sum", "Average", "Min", "Max", "Product"])
@on("ranks")
def test_allreduce_of_every_op_has_the_gradient_of_the_summed_losses(op: str, factors: tuple[float, float]) -> None:
    def single(tensor: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(tensor, op=getattr(hvd, op), prescale_factor=factors[0], postscale_factor=factors[1])

    def grouped(tensor: torch.Tensor) -> torch.Tensor:
        parts = hvd.grouped_allreduce(
            [tensor[0], torch.tensor([3]), tensor[1]], name="g", op=getattr(hvd, op), prescale_factor=factors[0]
        )
        return torch.cat([parts[0], parts[2]])

    _check_gradient(single, _input(hvd.rank()), mean=False)
    _check_gradient(grouped, _input(hvd.rank()), mean=False)


@on("ranks")
def test_allgather_and_broadcast_have_the_gradient_of_the_mean_loss() -> None:
    r = hvd.rank()
    _check_gradient(hvd.allgather, _input(r, rows=r + 1), mean=True)
    _check_gradient(
        lambda t: torch.cat([p.flatten() for p in hvd.grouped_allgather([t, t[:1] * 2])]), _input(r), mean=True
    )
    _check_gradient(lambda t: hvd.broadcast(t, hvd.size() - 1), _input(r), mean=True)


@on("ranks")
def test_ties_share_the_gradient_of_min_and_max() -> None:
    n, r = hvd.size(), hvd.rank()
    for op in (hvd.Min, hvd.Max):
        tied = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        hvd.allreduce(tied, op=op).sum().backward()
        assert torch.equal(tied.grad, torch.ones(3, dtype=torch.float64))  # n losses, 1/n of each
    own = torch.tensor([0.0 if r < 2 else -1.0], dtype=torch.float64, requires_grad=True)
    hvd.allreduce(own, op=hvd.Max).sum().backward()
    assert own.grad.item() == (n / 2 if r < 2 else 0.0)


@on("ranks2")
def test_sums_can_be_differentiated_twice() -> None:
    own = _input(hvd.rank()).requires_grad_()
    total = hvd.allreduce(own, op=hvd.Sum, name="twice")
    (first,) = torch.autograd.grad(total.pow(3).sum(), own, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), own)
    summed = _input(0) + _input(1)
    torch.testing.assert_close(first, 2 * 3 * summed.pow(2))
    torch.testing.assert_close(second, 4 * 6 * summed)


@on("ranks2")
def test_compressed_extremes_send_the_gradient_to_whoever_holds_the_rounded_value() -> None:
    """bfloat16 cannot tell 1 and 1 + 2^-9 apart, so both ranks hold the first maximum."""
    own = torch.tensor([1 + hvd.rank() * 2.0**-9, float(hvd.rank())], requires_grad=True)
    result = hvd.allreduce(own, op=hvd.Max, compression=hvd.Compression.bf16)
    assert torch.equal(result.detach(), torch.ones(2))
    result.sum().backward()
    assert own.grad.tolist() == [1.0, 2.0 * hvd.rank()]


@on("ranks2")
def test_in_place_forms_do_not_lose_gradients_silently() -> None:
    leaf = torch.ones(3, requires_grad=True)
    computed = leaf * 2
    for call in (hvd.allreduce_, hvd.allreduce_async_, lambda t: hvd.broadcast_(t, 0)):
        with pytest.raises(ValueError, match="autograd cannot follow an in-place operation"):
            call(computed)
    saved = leaf * leaf  # remembers leaf
    hvd.broadcast_(leaf, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


# Of products of complex numbers: those of the sum of all ranks' losses, in one process, where torch multiplies.


def _values(rank: int) -> torch.Tensor:
    angles = torch.arange(6, dtype=torch.float64) * 0.7 + rank
    return torch.polar(1 + 0.1 * torch.cos(3 * angles), angles).view(2, 3)


def _loss(result: torch.Tensor, rank: int) -> torch.Tensor:
    """Not holomorphic, and other than that of another rank."""
    weights = torch.sin(torch.arange(result.numel(), dtype=torch.float64) + rank).view(result.shape)
    return (weights * result.real.pow(2) + (1 + rank) * result.imag * result.real + result.abs()).sum()


def _gradient_in_one_process(
    inputs: Sequence[torch.Tensor], reduced: Callable[[torch.Tensor, int], torch.Tensor], scale: float = 1.0
) -> torch.Tensor:
    """Of this rank's input; ``reduced``: what a rank gets of the whole product."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    whole = leaves[0]
    for leaf in leaves[1:]:
        whole = whole * leaf
    whole = whole * scale
    sum((_loss(reduced(whole, rank), rank) for rank in range(len(inputs))), torch.tensor(0.0)).backward()
    gradient = leaves[hvd.rank()].grad
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.5, 3.0)], ids=str)
@on("ranks")
def test_the_gradient_is_that_of_one_process(factors: tuple[float, float]) -> None:
    pre, post = factors
    inputs = [_values(rank) for rank in range(hvd.size())]
    wanted = _gradient_in_one_process(inputs, lambda whole, _: whole, pre ** hvd.size() * post)
    for name in (None, "named", "named"):
        own = inputs[hvd.rank()].clone().requires_grad_()
        result = hvd.allreduce(own, name=name, op=hvd.Product, prescale_factor=pre, postscale_factor=post)
        _loss(result, hvd.rank()).backward()
        torch.testing.assert_close(own.grad.resolve_conj(), wanted, rtol=1e-12, atol=1e-12)
    own = inputs[hvd.rank()].clone().requires_grad_()
    one, _, two = hvd.grouped_allreduce(
        [own[0], torch.tensor([2]), own[1]], op=hvd.Product, prescale_factor=1.0, postscale_factor=1.0
    )
    _loss(torch.stack([one, two]), hvd.rank()).backward()
    torch.testing.assert_close(
        own.grad.resolve_conj(), _gradient_in_one_process(inputs, lambda whole, _: whole), rtol=1e-12, atol=1e-12
    )


@on("ranks")
def test_the_gradient_of_rows_is_that_of_one_process_times_the_number_of_ranks() -> None:
    """As that of ``reducescatter`` is of real numbers, too."""
    n = hvd.size()
    inputs = [torch.cat([_values(rank), _values(rank + 5)]) for rank in range(n)]
    wanted = n * _gradient_in_one_process(inputs, lambda whole, rank: torch.tensor_split(whole, n)[rank])
    own = inputs[hvd.rank()].clone().requires_grad_()
    _loss(hvd.reducescatter(own, op=hvd.Product), hvd.rank()).backward()
    torch.testing.assert_close(own.grad.resolve_conj(), wanted, rtol=1e-12, atol=1e-12)


@on("ranks")
def test_the_gradient_is_right_where_values_are_zero() -> None:
    def values(rank: int) -> torch.Tensor:
        made = _values(rank).flatten()
        made[0] = 0 if rank == 0 else made[0]  # of one rank
        made[1] = 0 if rank < 2 else made[1]  # of two
        return made

    n = hvd.size()
    inputs = [values(rank) for rank in range(n)]
    others = torch.ones(6, dtype=torch.complex128)
    for rank in range(n):
        others = others if rank == hvd.rank() else others * inputs[rank]
    own = inputs[hvd.rank()].clone().requires_grad_()
    result = hvd.allreduce(own, op=hvd.Product)
    (gradient,) = torch.autograd.grad(result, own, torch.full_like(result, 1 + 2j))
    torch.testing.assert_close(gradient.resolve_conj(), n * (1 + 2j) * others.conj().resolve_conj())
    rows = hvd.reducescatter(own, op=hvd.Product)
    (gradient,) = torch.autograd.grad(rows, own, torch.full_like(rows, 1 + 2j))
    torch.testing.assert_close(gradient.resolve_conj(), n * (1 + 2j) * others.conj().resolve_conj())


def _batches(rows: list[int], shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """The batch of each rank, ``[rows, *shape]``; means far from zero, so that sums of squares would lose digits."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(sum(rows), *shape, generator=generator, dtype=torch.float64) * 0.5 + 100
    return list(whole.to(dtype).split(rows))


def _layer(layer_class: type[nn.Module], dtype: torch.dtype, **options: object) -> nn.Module:
    layer = layer_class(3, **options).to(dtype)
    if layer.weight is not None:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([0.5, -1.5, 2.0]))
            layer.bias.copy_(torch.tensor([1.0, 0.0, -3.0]))
    return layer


CASES = [
    ([4, 4], (3,), torch.float64, {}), ([5, 2], (3, 4, 3), torch.float64, {}), ([5, 2], (3, 4, 3), torch.float32, {}),
    ([6, 0], (3, 2), torch.float64, {}), ([3, 2], (3, 2, 2, 2), torch.float64, {"affine": False}),
    ([3, 2], (3,), torch.float64, {"momentum": None}), ([3, 2], (3,), torch.float64, {"track_running_stats": False}),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "shape", "dtype", "options"), CASES, ids=str)
@on("ranks2")
def test_it_is_one_process_with_the_whole_batch(
    rows: list[int], shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, object]
) -> None:
    alone = _layer(
        {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}[len(shape)], dtype, **options
    )
    layer = _layer(hvd.SyncBatchNorm, dtype, **options)
    close = {"rtol": 1e-6, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    for _ in range(2):
        batches = _batches(rows, shape, dtype)
        whole = torch.cat(batches).requires_grad_()
        mine = batches[hvd.rank()].clone().requires_grad_()
        wanted, result = alone(whole), layer(mine)
        factors = torch.linspace(-1, 2, wanted.numel(), dtype=dtype).view_as(wanted)
        (wanted * factors).sum().backward()
        (result * factors.split(rows)[hvd.rank()]).sum().backward()
        torch.testing.assert_close(result, wanted.split(rows)[hvd.rank()], **close)
        torch.testing.assert_close(mine.grad, whole.grad.split(rows)[hvd.rank()], **close)
    for one, other in zip(alone.parameters(), layer.parameters(), strict=True):
        summed = hvd.allreduce(other.grad, op=hvd.Sum)
        torch.testing.assert_close(summed, one.grad, rtol=1e-5 if dtype == torch.float32 else 1e-9, atol=close["atol"])
    for (name, one), (_, other) in zip(alone.named_buffers(), layer.named_buffers(), strict=True):
        torch.testing.assert_close(other, one, **close, msg=lambda text, name=name: f"{name}: {text}")
    layer.eval()
    alone.eval()
    if hvd.rank() == 0 and options.get("track_running_stats", True):  # evaluation needs no other rank
        batch = _batches([2, 2], shape, dtype)[0]
        torch.testing.assert_close(layer(batch), alone(batch), **close)


@on("ranks2")
def test_a_converted_model_keeps_its_parameters_and_a_layer_alone_its_mode() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64)))
    parameters, names = list(model.parameters()), model.state_dict().keys()
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert isinstance(model[1], hvd.SyncBatchNorm) and isinstance(model[2][1], hvd.SyncBatchNorm)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert model.state_dict().keys() == names
    layer = nn.BatchNorm1d(3, eps=0.25, momentum=0.5, affine=False).eval()
    new = hvd.SyncBatchNorm.convert_sync_batchnorm(layer)
    assert isinstance(new, hvd.SyncBatchNorm) and not new.training and new.weight is None
    assert (new.eps, new.momentum, new.num_features, new.affine) == (0.25, 0.5, 3, False)
    assert new.running_mean is layer.running_mean
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(new) is new
    with pytest.raises(UsageError, match="has no parameters yet"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


@on("ranks4")
def test_sets_of_ranks_normalize_apart() -> None:
    sets = [hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])]
    own = sets[hvd.rank() % 2]
    layer = copy.deepcopy(hvd.SyncBatchNorm(1, affine=False, process_set=own))
    result = layer(torch.tensor([[float(hvd.rank())]]))
    assert result.sign().item() == (-1 if hvd.rank() < 2 else 1)
    other = hvd.SyncBatchNorm(1, process_set=sets[1 - hvd.rank() % 2])
    with pytest.raises(UsageError, match="is not a member of"):
        other(torch.ones(2, 1))
    for each in sets:
        hvd.remove_process_set(each)


@on("ranks2")
def test_what_is_wrong_is_said() -> None:
    layer = hvd.SyncBatchNorm(3)
    with pytest.raises(UsageError, match=r"expected at least 2D input \(got 1D input\)"):
        layer(torch.ones(3))
    with pytest.raises(UsageError, match=r"SyncBatchNorm\(3\): the input has 2 channels: \[4, 2\]"):
        layer(torch.ones(4, 2))
    with pytest.raises(UnsupportedError, match=r"torch\.int64 tensor on cpu"):
        layer(torch.ones(4, 3, dtype=torch.int64))
    with pytest.raises(UsageError, match="expected more than 1 value per channel when training, got 1 on all ranks"):
        layer(torch.ones(hvd.rank(), 3))
    with pytest.raises(MismatchError):
        hvd.SyncBatchNorm(2 + hvd.rank())(torch.ones(4, 2 + hvd.rank()))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
