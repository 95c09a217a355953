"""Gradients that are views of one storage: each is averaged once, as if it had memory of its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import on
from small_model import assert_close

import horo.torch as hvd
from horo.torch.compression import Compressor

Loss = Callable[[], torch.Tensor]


class Viewing(Compressor):
    """Sends a view of the gradient."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.view(-1), tensor.shape

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.view(ctx)


def _leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def _numbers(start: int, end: int) -> torch.Tensor:
    return torch.arange(float(start), float(end), dtype=torch.float64)


def _case(kind: str) -> tuple[list[torch.Tensor], Loss, list[torch.Tensor]]:
    """Parameters, a loss that is linear in them, and its gradients."""
    if kind == "stack":
        leaves = _leaves(*[(3,)] * 4)
        factors = _numbers(1, 13).view(4, 3)
        return leaves, lambda: torch.sum(torch.stack(leaves) * factors), list(factors)
    if kind == "flat":
        leaves = _leaves((2, 3), (2,), (1, 1))
        wanted = [_numbers(1, 7).view(2, 3), _numbers(7, 9), _numbers(9, 10).view(1, 1)]
        return leaves, lambda: torch.nn.utils.parameters_to_vector(leaves) @ _numbers(1, 10), wanted
    if kind == "the same":
        leaves = _leaves((2, 2), (4, 1), (4,))
        wanted = [_numbers(1, 5).view(leaf.shape) for leaf in leaves]
        return leaves, lambda: (leaves[0].view(4) + leaves[1].view(4) + leaves[2].view(4)) @ _numbers(1, 5), wanted
    leaves = _leaves((3,), (3,), (2,), (4,))  # "overlapping"
    wanted = [_numbers(1, 4), _numbers(4, 7), _numbers(1, 3), _numbers(3, 7)]
    return leaves, lambda: (torch.cat(leaves[:2]) + torch.cat(leaves[2:])) @ _numbers(1, 7), wanted


def _optimizer(leaves: list[torch.Tensor], **options: Any) -> Any:
    named = [(f"p{number}", leaf) for number, leaf in enumerate(leaves)]
    return hvd.DistributedOptimizer(torch.optim.SGD(leaves, lr=1.0), named, **options)


def _assert_gradients(leaves: list[torch.Tensor], wanted: list[torch.Tensor], factor: float) -> None:
    assert_close([leaf.grad for leaf in leaves], [gradient * factor for gradient in wanted])


@pytest.mark.parametrize("kind", ["stack", "flat", "the same", "overlapping"])
@on("ranks2_in_each_order")
def test_gradients_that_are_views_of_one_storage_are_averaged_or_summed(kind: str) -> None:
    for options in (
        {},
        {"op": hvd.Sum},
        {"compression": hvd.Compression.bf16},  # small integers are exact in it
        {"compression": Viewing},
        {"groups": 1},
        {"gradient_predivide_factor": 2.0},
    ):
        leaves, loss, wanted = _case(kind)
        optimizer = _optimizer(leaves, **options)
        factor = 3.0 if options.get("op") == hvd.Sum else 1.5
        for step in range(1, 4):
            optimizer.zero_grad()
            (loss() * (hvd.rank() + 1)).backward()
            optimizer.step()
            _assert_gradients(leaves, wanted, factor)
            assert_close([leaf.detach() for leaf in leaves], [-step * factor * each for each in wanted])


@pytest.mark.parametrize("kind", ["stack", "the same", "overlapping"])
@on("ranks2_in_backward")
def test_a_second_backward_adds_to_averaged_views(kind: str) -> None:
    for op, factor in ((hvd.Average, 1.5), (hvd.Sum, 3.0)):
        leaves, loss, wanted = _case(kind)
        optimizer = _optimizer(leaves, op=op)
        for number in range(1, 4):
            (loss() * (hvd.rank() + 1)).backward()
            _assert_gradients(leaves, wanted, factor * number)
        torch.nn.utils.clip_grad_value_(leaves, 0.5)
        assert all(leaf.grad is not None and leaf.grad.eq(0.5).all() for leaf in leaves)
        optimizer.step()


@on("ranks2_in_each_order")
def test_gradients_stay_in_the_buffer_that_the_script_has_put_them_into() -> None:
    for op, factor in ((hvd.Average, 1.5), (hvd.Sum, 3.0)):
        leaves, loss, wanted = _case("flat")
        first, second = _optimizer(leaves[:2], op=op), _optimizer(leaves[2:], op=op)
        buffer = torch.zeros(9, dtype=torch.float64)
        offset = 0
        for leaf in leaves:
            leaf.grad = buffer[offset : offset + leaf.numel()].view_as(leaf)
            offset += leaf.numel()
        for _ in range(3):
            buffer.zero_()
            (loss() * (hvd.rank() + 1)).backward()
            first.step()
            second.step()
            _assert_gradients(leaves, wanted, factor)
            assert_close([buffer], [torch.cat([each.flatten() for each in wanted]) * factor])


@pytest.mark.parametrize("through", ["the gradient", "the buffer"])
@on("ranks2_in_step")
def test_a_view_that_was_changed_while_it_was_being_reduced_is_found(through: str) -> None:
    leaves, loss, _ = _case("flat")
    optimizer = _optimizer(leaves)
    buffer = torch.zeros(9, dtype=torch.float64)
    for leaf, part in zip(leaves, buffer.split([6, 2, 1]), strict=True):
        leaf.grad = part.view_as(leaf)
    loss().backward()
    changed = leaves[1].grad if through == "the gradient" else buffer
    assert changed is not None
    changed.mul_(0.5)
    with pytest.raises(ValueError, match="was changed while it was being reduced"):
        optimizer.step()


@on("ranks2_in_step")
def test_a_group_with_an_unused_parameter_may_share_memory_with_another_group() -> None:
    for first in (True, False):
        leaves, loss, wanted = _case("stack")
        (unused,) = _leaves((2,))
        groups = [leaves[:2], leaves[2:]]
        groups[0 if first else 1].append(unused)
        optimizer = _optimizer([*leaves, unused], groups=groups)
        for _ in range(3):
            optimizer.zero_grad()
            with optimizer.no_sync():
                loss().backward()
            (loss() * (hvd.rank() + 1)).backward()
            optimizer.step()
            _assert_gradients(leaves, wanted, 2.5)
