"""Gradients that travel as 16-bit floats, between real processes."""

from __future__ import annotations

import torch
from rank_pool import RankPool

import horo.torch as hvd


def test_one_optimizer_may_compress_gradients_of_several_dtypes_in_groups_and_alone(ranks2: RankPool) -> None:
    """float32 and float64 travel as float16, which cannot hold 2^-12 beside 1; bfloat16 travels as it is."""

    def check(groups: int | None) -> None:
        dtypes = [torch.float32, torch.float64, torch.bfloat16]
        parameters = [torch.nn.Parameter(torch.zeros(count, dtype=dtype)) for dtype in dtypes for count in (3, 5000)]
        named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0), named, compression=hvd.Compression.fp16, groups=groups
        )
        sum((p * (1 + 2.0**-12) * (hvd.rank() + 1)).sum().double() for p in parameters).backward()
        memory = [p.grad.data_ptr() for p in parameters if p.grad is not None]
        optimizer.step()
        assert [p.grad.data_ptr() for p in parameters if p.grad is not None] == memory
        for parameter in parameters:
            assert parameter.grad is not None
            assert (parameter.grad == 1.5).all()

    for groups in (None, 2):
        ranks2.run(check, groups)


def test_two_optimizers_may_compress_differently(ranks2: RankPool) -> None:
    def check() -> None:
        fine = 1 + 2.0**-12
        for compression, wanted in (
            (hvd.Compression.none, fine),
            (hvd.Compression.bf16, 1.0),
            (hvd.Compression.fp16, 1.0),
        ):
            parameter = torch.nn.Parameter(torch.zeros(3000))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0), [("p", parameter)], compression=compression
            )
            for _ in range(2):
                optimizer.zero_grad()
                (parameter * fine).sum().backward()
                optimizer.step()
                assert parameter.grad is not None
                assert (parameter.grad == wanted).all()

    ranks2.run(check)


def test_predividing_keeps_a_sum_of_float16_in_range(ranks2: RankPool) -> None:
    """A gradient beyond float16 is divided before it is rounded, and a result beyond it is infinite."""

    def check() -> None:
        for value, wanted in ((40000.0, 40000.0), (1e6, float("inf"))):
            parameter = torch.nn.Parameter(torch.zeros(3000))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0),
                [("p", parameter)],
                compression=hvd.Compression.fp16,
                gradient_predivide_factor=64.0,
            )
            (parameter * value).sum().backward()
            optimizer.step()
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, torch.full((3000,), wanted), rtol=2**-9, atol=0.0)

    ranks2.run(check)
