"""``op=hvd.Product`` of complex numbers between real processes: known answers, all forms, and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from rank_pool import RankPool

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


@by_dtype
def test_every_form_of_allreduce_gives_the_known_product(ranks: RankPool, dtype: torch.dtype) -> None:
    def check(dtype: torch.dtype) -> None:
        for shape in ((), (0,), (1,), (7, 3), (40_001,)):
            own, wanted = _own(shape, dtype), _product(shape)
            for _ in range(3):  # again from the cache of requests
                assert _is(hvd.allreduce(own, op=hvd.Product, name="x"), dtype, wanted)
                assert _is(hvd.allreduce(own, op=hvd.Product), dtype, wanted)
            assert _is(hvd.synchronize(hvd.allreduce_async(own, op=hvd.Product)), dtype, wanted)
            for written in (own.clone(), own.clone()):
                assert hvd.allreduce_(written, op=hvd.Product) is written
                assert _is(written, dtype, wanted)
            written = own.clone()
            assert hvd.synchronize(hvd.allreduce_async_(written, op=hvd.Product)) is written
            assert _is(written, dtype, wanted)
            assert _is(own, dtype, _own(shape, dtype).to(torch.complex128))  # what was given is as it was

    ranks.run(check, dtype)


def test_every_form_of_a_group_gives_the_known_products(ranks: RankPool) -> None:
    def check() -> None:
        def given() -> list[torch.Tensor]:
            return [*(_own((k + 5,), dtype) for k, dtype in enumerate(DTYPES)), torch.full((3,), 2.0)]

        def right(results: Sequence[torch.Tensor]) -> bool:
            *numbers, real = results
            named = zip(numbers, enumerate(DTYPES), strict=True)
            return real.tolist() == [2.0 ** hvd.size()] * 3 and all(
                _is(result, dtype, _product((k + 5,))) for result, (k, dtype) in named
            )

        for _ in range(2):
            assert right(hvd.grouped_allreduce(given(), op=hvd.Product))
            assert right(hvd.synchronize(hvd.grouped_allreduce_async(given(), op=hvd.Product)))
            written = given()
            hvd.grouped_allreduce_(written, op=hvd.Product)
            assert right(written)
            written = given()
            hvd.synchronize(hvd.grouped_allreduce_async_(written, op=hvd.Product))
            assert right(written)

    ranks.run(check)


@by_dtype
def test_every_form_of_reducescatter_gives_the_known_rows(ranks: RankPool, dtype: torch.dtype) -> None:
    def check(dtype: torch.dtype) -> None:
        for rows in (0, 1, hvd.size(), 7, 5001):
            own = _own((rows, 3), dtype)
            mine = torch.tensor_split(_product((rows, 3)), hvd.size())[hvd.rank()]
            for _ in range(2):
                assert _is(hvd.reducescatter(own, op=hvd.Product, name="x"), dtype, mine)
            assert _is(hvd.synchronize(hvd.reducescatter_async(own, op=hvd.Product)), dtype, mine)
            for group in (
                hvd.grouped_reducescatter([own, own], op=hvd.Product),
                hvd.synchronize(hvd.grouped_reducescatter_async([own, own], op=hvd.Product)),
            ):
                assert all(_is(part, dtype, mine) for part in group)
            scaled = hvd.reducescatter(own, op=hvd.Product, prescale_factor=0.5, postscale_factor=-4.0)
            assert _is(scaled, dtype, mine * 0.5 ** hvd.size() * -4)

    ranks.run(check, dtype)


@by_dtype
def test_factors_are_real(ranks: RankPool, dtype: torch.dtype) -> None:
    def check(dtype: torch.dtype) -> None:
        for count in (3, 20_001):
            wanted = _product((count,)) * 0.5 ** hvd.size() * -4
            factors = {"prescale_factor": 0.5, "postscale_factor": -4.0}
            assert _is(hvd.allreduce(_own((count,), dtype), op=hvd.Product, **factors), dtype, wanted)
            compressed = hvd.allreduce(
                _own((count,), dtype), op=hvd.Product, compression=hvd.Compression.fp16, **factors
            )
            assert _is(compressed, dtype, wanted)  # complex numbers travel as they are

    ranks.run(check, dtype)


def test_views_are_what_they_show(ranks2: RankPool) -> None:
    def check() -> None:
        own = _own((6, 4), torch.complex64)
        wanted = _product((6, 4))
        for _ in range(2):
            assert _is(hvd.allreduce(own.conj(), op=hvd.Product, name="conj"), torch.complex64, wanted.conj())
            assert _is(hvd.allreduce(own, op=hvd.Product, name="conj"), torch.complex64, wanted)
            assert _is(hvd.allreduce(own.t(), op=hvd.Product), torch.complex64, wanted.t())
            assert _is(hvd.allreduce(own[::2, 1::2], op=hvd.Product), torch.complex64, wanted[::2, 1::2])
            assert _is(hvd.allreduce(own[:1].expand(5, 4), op=hvd.Product), torch.complex64, wanted[:1].expand(5, 4))
            rows = hvd.reducescatter(own.conj().t(), op=hvd.Product)
            assert _is(rows, torch.complex64, torch.tensor_split(wanted.conj().t(), 2)[hvd.rank()])
            pairs = torch.view_as_real(own).clone()
            assert _is(hvd.allreduce(torch.view_as_complex(pairs), op=hvd.Product), torch.complex64, wanted)
        base = own.clone()
        hvd.allreduce_(base.conj(), op=hvd.Product)  # written through the view, so conjugated twice
        assert _is(base, torch.complex64, wanted)
        base = own.clone()
        hvd.allreduce_(base[:, 1], op=hvd.Product)
        assert _is(base[:, 1], torch.complex64, wanted[:, 1])
        assert torch.equal(base[:, 0], own[:, 0])
        pairs = torch.view_as_real(own).clone()
        hvd.allreduce_(torch.view_as_complex(pairs), op=hvd.Product)
        assert torch.equal(pairs, torch.view_as_real(wanted.to(torch.complex64)))

    ranks2.run(check)


def test_one_rank_gets_its_own_values(ranks: RankPool) -> None:
    def check() -> None:
        sets = [hvd.add_process_set([r]) for r in range(hvd.size())]
        alone = sets[hvd.rank()]
        for dtype in DTYPES:
            own = _own((5,), dtype)
            assert _is(hvd.allreduce(own, op=hvd.Product, process_set=alone), dtype, own.to(torch.complex128))
            scaled = hvd.reducescatter(own, op=hvd.Product, prescale_factor=3.0, process_set=alone)
            assert _is(scaled, dtype, 3 * own.to(torch.complex128))
        for one in sets:
            hvd.remove_process_set(one)

    ranks.run(check)


def test_a_process_set_multiplies_what_its_ranks_have(ranks: RankPool) -> None:
    def check() -> None:
        members = list(range(1, hvd.size()))
        some = hvd.add_process_set(members)
        if some.included():
            for dtype in DTYPES:
                got = hvd.allreduce(_own((9,), dtype), op=hvd.Product, process_set=some)
                assert _is(got, dtype, _product((9,), members))
                rows = hvd.reducescatter(_own((9,), dtype), op=hvd.Product, process_set=some)
                wanted = torch.tensor_split(_product((9,), members), len(members))[some.rank()]
                assert _is(rows, dtype, wanted)
        hvd.remove_process_set(some)

    ranks.run(check)


def test_ranks_that_have_joined_multiply_by_one(ranks: RankPool) -> None:
    def check() -> None:
        last = hvd.size() - 1
        if hvd.rank() != last:
            for dtype in DTYPES:
                for count in (1, 5, 4001):
                    got = hvd.allreduce(_own((count,), dtype), op=hvd.Product, name=f"{dtype} {count}")
                    assert _is(got, dtype, _product((count,), range(last)))
        hvd.join()

    ranks.run(check)


def test_what_is_not_finite_is_what_the_formula_says(ranks2: RankPool) -> None:
    """(inf + 0i)(0 + 1i) is (inf * 0 - 0 * 1) + (inf * 1 + 0 * 0)i."""

    def check() -> None:
        own = torch.tensor([complex(math.inf, 0), 1j][hvd.rank()]).repeat(70)
        got = hvd.allreduce(own, op=hvd.Product)
        assert got.real.isnan().all() and (got.imag == math.inf).all()

    ranks2.run(check)


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
def test_the_gradient_is_that_of_one_process(ranks: RankPool, factors: tuple[float, float]) -> None:
    def check(factors: tuple[float, float]) -> None:
        pre, post = factors
        inputs = [_values(rank) for rank in range(hvd.size())]
        wanted = _gradient_in_one_process(inputs, lambda whole, _: whole, pre ** hvd.size() * post)
        for name in (None, "named", "named"):
            own = inputs[hvd.rank()].clone().requires_grad_()
            result = hvd.allreduce(own, name=name, op=hvd.Product, prescale_factor=pre, postscale_factor=post)
            _loss(result, hvd.rank()).backward()
            assert own.grad is not None
            torch.testing.assert_close(own.grad.resolve_conj(), wanted, rtol=1e-12, atol=1e-12)
        own = inputs[hvd.rank()].clone().requires_grad_()
        one, _, two = hvd.grouped_allreduce(
            [own[0], torch.tensor([2]), own[1]], op=hvd.Product, prescale_factor=1.0, postscale_factor=1.0
        )
        _loss(torch.stack([one, two]), hvd.rank()).backward()
        assert own.grad is not None
        torch.testing.assert_close(
            own.grad.resolve_conj(), _gradient_in_one_process(inputs, lambda whole, _: whole), rtol=1e-12, atol=1e-12
        )

    ranks.run(check, factors)


def test_the_gradient_of_rows_is_that_of_one_process_times_the_number_of_ranks(ranks: RankPool) -> None:
    """As that of ``reducescatter`` is of real numbers, too."""

    def check() -> None:
        n = hvd.size()
        inputs = [torch.cat([_values(rank), _values(rank + 5)]) for rank in range(n)]
        wanted = n * _gradient_in_one_process(inputs, lambda whole, rank: torch.tensor_split(whole, n)[rank])
        own = inputs[hvd.rank()].clone().requires_grad_()
        _loss(hvd.reducescatter(own, op=hvd.Product), hvd.rank()).backward()
        assert own.grad is not None
        torch.testing.assert_close(own.grad.resolve_conj(), wanted, rtol=1e-12, atol=1e-12)

    ranks.run(check)


def test_the_gradient_is_right_where_values_are_zero(ranks: RankPool) -> None:
    def check() -> None:
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

    ranks.run(check)


@by_dtype
def test_every_dtype_has_the_gradient(ranks2: RankPool, dtype: torch.dtype) -> None:
    def check(dtype: torch.dtype) -> None:
        own = torch.tensor([[2 + 1j, -1j], [1 - 1j, 4 + 0j]][hvd.rank()]).to(dtype).requires_grad_()
        for result in (hvd.allreduce(own, op=hvd.Product), hvd.reducescatter(own, op=hvd.Product)):
            (gradient,) = torch.autograd.grad(result, own, torch.full_like(result, 1j))
            other = torch.tensor([[1 + 1j, 4 + 0j], [2 - 1j, 1j]][hvd.rank()])  # conjugated
            assert gradient.dtype is dtype
            torch.testing.assert_close(gradient.to(torch.complex64), 2j * other, rtol=2e-3, atol=2e-3)

    ranks2.run(check, dtype)
