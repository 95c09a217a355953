"""Parameters that some ranks or none use in a step: each step is the one of a process that has all batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from rank_pool import on, one_of
from small_model import make_batch

import horo.torch as hvd
from horo.torch.compression import Compressor
from horo.torch.engine import runtime

Record = list[torch.Tensor | None]
Make = Callable[[torch.nn.ModuleList], torch.optim.Optimizer]
Use = Callable[[int, int], list[int]]
"""The parts that a rank uses in a step."""
PARTS = 4
STEPS = 6


def make_parts(sparse: bool = False) -> torch.nn.ModuleList:
    torch.manual_seed(0)
    kind = torch.nn.Embedding(9, 3, sparse=True) if sparse else torch.nn.Linear(4, 3)
    return torch.nn.ModuleList(copy.deepcopy(kind) for _ in range(PARTS)).double()


def loss_of(parts: torch.nn.ModuleList, used: list[int], rank: int, step: int) -> torch.Tensor:
    """The loss of a rank. It is a constant where the rank uses no part."""
    batch = make_batch(rank, step)
    loss = torch.zeros((), dtype=torch.float64, requires_grad=True).clone()
    for index in used:
        part = parts[index]
        loss = (
            loss + part((batch * 4).abs().long() % 9 if isinstance(part, torch.nn.Embedding) else batch).square().mean()
        )
    return loss


def adamw(parts: torch.nn.ModuleList) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parts.parameters(), lr=0.1, weight_decay=0.3)


def sgd(parts: torch.nn.ModuleList) -> torch.optim.Optimizer:
    return torch.optim.SGD(parts.parameters(), lr=0.1, momentum=0.9, weight_decay=0.3)


def sparse_adam(parts: torch.nn.ModuleList) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(parts.parameters()), lr=0.1)


def plain_sgd(parts: torch.nn.ModuleList) -> torch.optim.Optimizer:
    return torch.optim.SGD(parts.parameters(), lr=0.1)


class OwnCompressor(Compressor):
    """Sends single precision."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.float(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


def by_no_rank(rank: int, step: int) -> list[int]:
    return [0]


def by_one_rank(rank: int, step: int) -> list[int]:
    return [0, 1] if rank == 1 else [0]


def by_step(rank: int, step: int) -> list[int]:
    """Part 0 all ranks, 1 all in some steps, 2 one rank in some steps, 3 the ranks in turn, and none before."""
    return [
        0,
        *([1] if step % 2 else []),
        *([2] if step in {1, 4} and rank == 0 else []),
        *([3] if rank == step - 3 else []),
    ]


def by_nobody_at_first(rank: int, step: int) -> list[int]:
    """A rank without any part takes part from its step()."""
    return [] if step < 2 or (step == 3 and rank == 0) else [rank % PARTS]


USES = [by_no_rank, by_one_rank, by_step, by_nobody_at_first]


def train(
    parts: torch.nn.ModuleList,
    optimizer: torch.optim.Optimizer,
    use: Use,
    ranks: list[int],
    *,
    passes: int = 1,
    is_sum: bool = False,
    set_to_none: bool = True,
    local: Callable[[], Any] = nullcontext,
) -> Iterator[Record]:
    """Trains with the batches of ``ranks``; gives the parameters and gradients of each step."""
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none)
        for number in range(passes):
            losses = torch.stack([loss_of(parts, use(rank, step + number), rank, step + number) for rank in ranks])
            with local() if number + 1 < passes else nullcontext():
                (losses.sum() if is_sum else losses.mean()).backward()
        optimizer.step()
        parameters = list(parts.parameters())
        grads = [None if p.grad is None else p.grad.to_dense().clone() for p in parameters]
        yield [*(p.detach().clone() for p in parameters), *grads]


def compare(
    make: Make, use: Use, *, sparse: bool = False, in_no_sync: bool = False, tolerance: float = 1e-9, **given: Any
) -> None:
    """On every rank: trains alone with all batches, then together, and compares each step."""
    loop = {name: given.pop(name) for name in ("passes", "set_to_none") if name in given}
    loop["is_sum"] = given.get("op") == hvd.Sum
    alone = make_parts(sparse)
    wanted = list(train(alone, make(alone), use, list(range(hvd.size())), **loop))
    parts = make_parts(sparse)
    optimizer = hvd.DistributedOptimizer(make(parts), parts.named_parameters(), **given)
    if in_no_sync:
        loop["local"] = optimizer.no_sync
    found = train(parts, optimizer, use, [hvd.rank()], **loop)
    for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None), f"step {step}: {ours} instead of {theirs}"
            if one is not None:
                torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=f"{step}: {one} != {other}")


pools = one_of("ranks2_always", "ranks2_never", "ranks4_always")
by_use = pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)


@by_use
@pytest.mark.parametrize("make", [adamw, sgd], ids=lambda make: make.__name__)
@on("pools")
def test_a_step_moves_what_it_moves_in_one_process(make: Make, use: Use) -> None:
    compare(make, use)


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2},
        {"op": hvd.Sum},
        {"op": hvd.Sum, "passes": 3},
        {"gradient_predivide_factor": 2.0},
        {"passes": 3},
        {"passes": 3, "backward_passes_per_step": 3},
        {"passes": 3, "backward_passes_per_step": 2},
        {"passes": 3, "in_no_sync": True},
        {"set_to_none": False},
        {"compression": hvd.Compression.bf16, "tolerance": 0.02},
        {"compression": OwnCompressor, "tolerance": 1e-5},
    ],
    ids=str,
)
@on("ranks2_always")
def test_so_it_does_with_options(options: dict[str, Any]) -> None:
    compare(sgd, by_step, **options)


@by_use
@on("ranks2_in_backward")
def test_so_it_does_with_sparse_gradients(use: Use) -> None:
    compare(sparse_adam, use, sparse=True)
    compare(plain_sgd, use, sparse=True, sparse_as_dense=True)


@on("ranks2")
def test_what_all_ranks_or_none_use_costs_nothing() -> None:
    parts = make_parts()
    optimizer = hvd.DistributedOptimizer(sgd(parts), parts.named_parameters())
    counts = []
    uses = [[0], [0], [0, 1], [0], [0, 2], [0, 2], [0], [0, 1]]
    for step, used in enumerate(uses):
        optimizer.zero_grad()
        before = runtime.current().core.counters()["requests"]
        mine = [0] if step == 4 and hvd.rank() == 1 else used
        loss_of(parts, mine, hvd.rank(), step).backward()
        optimizer.step()
        counts.append(runtime.current().core.counters()["requests"] - before)
    # The first reduction compares parameters, and the third the gradients so far. The fifth gathers who has used
    # the two parameters of part 2, and reduces them again; all later ones have a request more, about these two.
    assert counts == [9, 8, 9, 8, 12, 9, 9, 9]


@on("ranks2_in_step")
def test_horovods_order_of_calls_keeps_its_zeros() -> None:
    parts = make_parts()
    optimizer = hvd.DistributedOptimizer(plain_sgd(parts), parts.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(parts, by_one_rank(hvd.rank(), step), hvd.rank(), step).backward()
        optimizer.step()
        assert [bool(part.weight.grad.any()) for part in parts] == [True, True, False, False]
