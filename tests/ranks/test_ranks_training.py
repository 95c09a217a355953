"""The correctness bar: ranks with a batch each train as one process does with all batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_pool import RankPool, one_of

import horo.torch as hvd

ranks = one_of("ranks2_always", "ranks2_never", "ranks4_always", "ranks4_never")
"""Two ranks and four, each both ways."""


STEPS = 20
BATCH = 4


class _Transformer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layer(self.embedding(tokens))).mean(1)
        return result


def _mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 11))


def _convolutional() -> torch.nn.Module:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 6, 3),
        torch.nn.BatchNorm2d(6),
        torch.nn.ReLU(),
        torch.nn.Conv2d(6, 4, 3, stride=2),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 11),
    )
    model[1].eval()  # batch statistics frozen
    return model.to(memory_format=torch.channels_last)


MODELS = {"mlp": _mlp, "convolutional": _convolutional, "transformer": _Transformer}


def _data(kind: str, step: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    target = torch.randint(0, 11, (count,), generator=generator)
    if kind == "transformer":
        return torch.randint(0, 11, (count, 5), generator=generator), target
    shape = (10,) if kind == "mlp" else (2, 7, 7)
    return torch.randn((count, *shape), generator=generator, dtype=torch.float64).to(dtype), target


def _train(kind: str, dtype: torch.dtype, rank: int, size: int, **options: Any) -> list[torch.Tensor]:
    """Parameters after all steps; ``size`` 1 and ``rank`` 0 with the whole batch is the single process."""
    torch.manual_seed(5)
    model = MODELS[kind]().to(dtype)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if hvd.is_initialized():
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        if options.get("groups") == "pairs":
            options["groups"] = [list(p) for p in zip(*[iter(model.parameters())] * 2, strict=False)]
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    whole = BATCH * options.pop("whole", size)
    for step in range(STEPS):
        data, target = _data(kind, step, whole, dtype)
        share = slice(rank * BATCH, (rank + 1) * BATCH) if hvd.is_initialized() else slice(None)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data[share]), target[share]).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _train_here(kind: str, dtype: torch.dtype, options: dict[str, Any]) -> list[torch.Tensor]:
    return _train(kind, dtype, hvd.rank(), hvd.size(), **options)


def _check_equal_to_one_process(pool: RankPool, kind: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    alone = _train(kind, dtype, 0, pool.size)
    results = pool.run(_train_here, kind, dtype, options)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    for result in results:
        for parameter, first, wanted in zip(result, results[0], alone, strict=True):
            assert torch.equal(parameter, first)
            torch.testing.assert_close(parameter, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_ranks_train_as_one_process_with_the_whole_batch(ranks: RankPool, kind: str, dtype: torch.dtype) -> None:
    _check_equal_to_one_process(ranks, kind, dtype, {})
