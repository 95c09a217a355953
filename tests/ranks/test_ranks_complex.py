"""``op=hvd.Product`` of complex numbers between real processes: known answers, all forms, and gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from rank_pool import on

import horo.torch as hvd

DTYPES = [torch.complex32, torch.complex64, torch.complex128]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def _factor(rank: int, index: int) -> complex:
    """So small and even that every dtype holds all products."""
    return [1 + 1j, 1j, -1 + 0j, 1 - 1j, -1j][(index + rank * (1 + index % 3)) % 5]


def _own(shape: Sequence[int], dtype: torch.dtype, rank: int | None = None) -> torch.Tensor:
    r = hvd.rank() if rank is None else rank
    return torch.tensor([_factor(r, i) for i in range(math.prod(shape))], dtype=torch.complex128).view(shape).to(dtype)


def _product(shape: Sequence[int], ranks: Sequence[int] | None = None) -> torch.Tensor:
    members = range(hvd.size()) if ranks is None else ranks
    numbers = [math.prod([_factor(r, i) for r in members], start=1 + 0j) for i in range(math.prod(shape))]
    return torch.tensor(numbers, dtype=torch.complex128).view(shape)


def _is(result: torch.Tensor, dtype: torch.dtype, wanted: torch.Tensor) -> bool:
    return result.dtype is dtype and torch.equal(result.to(torch.complex128), wanted)


FORMS = {
    "at once": hvd.allreduce,
    "async": lambda own, **options: hvd.synchronize(hvd.allreduce_async(own, **options)),
    "in place": lambda own, **options: hvd.allreduce_(own.clone(), **options),
    "async in place": lambda own, **options: hvd.synchronize(hvd.allreduce_async_(own.clone(), **options)),
}


@by_dtype
@on("ranks")
def test_every_form_of_allreduce_gives_the_known_product(dtype: torch.dtype) -> None:
    factors = {"prescale_factor": 0.5, "postscale_factor": -4.0}
    for shape in ((), (0,), (1,), (7, 3), (40_001,)):
        own, wanted = _own(shape, dtype), _product(shape)
        for form, name in itertools.product(FORMS.values(), ("x", None, "x")):  # again from the cache of requests
            assert _is(form(own, op=hvd.Product, name=name), dtype, wanted)
        scaled = hvd.allreduce(own, op=hvd.Product, compression=hvd.Compression.fp16, **factors)
        assert _is(scaled, dtype, wanted * 0.5 ** hvd.size() * -4)  # complex numbers travel as they are
        assert _is(own, dtype, _own(shape, dtype).to(torch.complex128))  # what was given is as it was


@on("ranks")
def test_every_form_of_a_group_gives_the_known_products() -> None:
    def given() -> list[torch.Tensor]:
        return [*(_own((k + 5,), dtype) for k, dtype in enumerate(DTYPES)), torch.full((3,), 2.0)]

    for form in (
        lambda: hvd.grouped_allreduce(given(), op=hvd.Product),
        lambda: hvd.synchronize(hvd.grouped_allreduce_async(given(), op=hvd.Product)),
        lambda: hvd.grouped_allreduce_(given(), op=hvd.Product),
        lambda: hvd.synchronize(hvd.grouped_allreduce_async_(given(), op=hvd.Product)),
    ):
        *numbers, real = form()
        assert real.tolist() == [2.0 ** hvd.size()] * 3
        for k, (result, dtype) in enumerate(zip(numbers, DTYPES, strict=True)):
            assert _is(result, dtype, _product((k + 5,)))


@by_dtype
@on("ranks")
def test_every_form_of_reducescatter_gives_the_known_rows(dtype: torch.dtype) -> None:
    for rows in (0, 1, hvd.size(), 7, 5001):
        own = _own((rows, 3), dtype)
        mine = torch.tensor_split(_product((rows, 3)), hvd.size())[hvd.rank()]
        results = [hvd.reducescatter(own, op=hvd.Product, name="x") for _ in range(2)]
        results.append(hvd.synchronize(hvd.reducescatter_async(own, op=hvd.Product)))
        results += hvd.grouped_reducescatter([own, own], op=hvd.Product)
        results += hvd.synchronize(hvd.grouped_reducescatter_async([own, own], op=hvd.Product))
        assert all(_is(part, dtype, mine) for part in results)
        scaled = hvd.reducescatter(own, op=hvd.Product, prescale_factor=0.5, postscale_factor=-4.0)
        assert _is(scaled, dtype, mine * 0.5 ** hvd.size() * -4)


@on("ranks2")
def test_views_are_what_they_show() -> None:
    dtype = torch.complex64
    own, wanted = _own((6, 4), dtype), _product((6, 4))
    for view in (
        lambda t: t.conj(),
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[::2, 1::2],
        lambda t: t[:1].expand(5, 4),
        lambda t: torch.view_as_complex(torch.view_as_real(t).clone()),
        lambda t: t.conj().t(),
    ):
        for _ in range(2):
            assert _is(hvd.allreduce(view(own), op=hvd.Product, name="view"), dtype, view(wanted))
        rows = hvd.reducescatter(view(own), op=hvd.Product)
        assert _is(rows, dtype, torch.tensor_split(view(wanted), 2)[hvd.rank()])
    base = own.clone()
    hvd.allreduce_(base.conj(), op=hvd.Product)  # written through the view, so conjugated twice
    assert _is(base, dtype, wanted)
    base = own.clone()
    hvd.allreduce_(base[:, 1], op=hvd.Product)
    assert _is(base[:, 1], dtype, wanted[:, 1])
    assert torch.equal(base[:, 0], own[:, 0])
    pairs = torch.view_as_real(own).clone()
    hvd.allreduce_(torch.view_as_complex(pairs), op=hvd.Product)
    assert torch.equal(pairs, torch.view_as_real(wanted.to(dtype)))


# Gradients: those of the sum of all ranks' losses, in one process, where torch multiplies.


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
