"""``hvd.SyncBatchNorm`` between real processes: equal to one process that has the batches of all ranks."""

import copy

import pytest
import torch
from rank_pool import on
from torch import nn

import horo.torch as hvd
from horo.errors import MismatchError, UnsupportedError, UsageError


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
def test_a_converted_model_keeps_its_parameters() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64)))
    parameters, names = list(model.parameters()), model.state_dict().keys()
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert isinstance(model[1], hvd.SyncBatchNorm) and isinstance(model[2][1], hvd.SyncBatchNorm)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert model.state_dict().keys() == names


@on("ranks2")
def test_a_layer_alone_is_converted_and_keeps_its_mode() -> None:
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
