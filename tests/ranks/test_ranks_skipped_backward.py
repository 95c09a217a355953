"""Ranks that skip ``backward()`` or use other parameters than others: right, or an error; none parts in silence."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import small_model as small
import torch
from rank_pool import on, on_own, one_of

import horo.torch as hvd
from horo.torch.engine import runtime
from horo.torch.optimizer.at_backward import BackwardReducer


def parts_of_rank_0(model: torch.nn.Module, step: int = 0) -> list[torch.Tensor]:
    """The gradients if rank 0 alone, of two, has a loss."""
    return [g / 2 for g in torch.autograd.grad(small.make_loss(model, 0, step), list(model.parameters()))]


@pytest.mark.parametrize("groups", [None, 1])
@on("ranks2_in_backward")
def test_gradients_clipped_where_another_rank_skipped_backward_are_an_error_on_all(groups: int | None) -> None:
    model, optimizer = small.made(groups=groups)
    told = r"rank 1 took part in the reduction.*the gradient of '0\.bias' is not equal.*optimizer\.synchronize\(\) on "
    for step in range(3):
        optimizer.zero_grad()
        if step < 2 or hvd.rank() == 0:
            small.make_loss(model, hvd.rank(), step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        before = small.bits_of(model)
        with pytest.raises(ValueError, match=told) if step == 2 else nullcontext():
            optimizer.step()
    assert small.bits_of(model) == before


@on("ranks2_in_backward")
def test_synchronize_on_every_rank_makes_clipping_right_where_one_skipped_backward() -> None:
    model, optimizer = small.made()
    for step in range(4):
        optimizer.zero_grad()
        wanted = parts_of_rank_0(model, step)
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in wanted]))
        if hvd.rank() == 0:
            small.make_loss(model, 0, step).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), float(norm) / 4)
        optimizer.step()
        for found, gradient in zip(small.gradients_of(model), wanted, strict=True):
            torch.testing.assert_close(found, gradient / 4, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("groups", [None, 1])
@on("ranks2_in_each_order")
def test_a_skipped_backward_is_no_error_where_gradients_stay_as_they_are(groups: int | None) -> None:
    model, optimizer = small.made(groups=groups)
    for step in range(6):
        optimizer.zero_grad()
        wanted = parts_of_rank_0(model, step) if step % 2 else small.mean_gradients(model, 2, step)
        if step % 2 == 0 or hvd.rank() == 0:
            small.make_loss(model, hvd.rank(), step).backward()
        optimizer.step()
        small.assert_close(small.gradients_of(model), wanted)


@pytest.mark.parametrize("clip", [True, False])
@on("ranks2_in_backward")
def test_a_sparse_gradient_clipped_where_another_rank_skipped_backward_is_an_error(clip: bool) -> None:
    table = torch.nn.Embedding(6, 2, sparse=True).double()
    hvd.broadcast_parameters(table.state_dict(), 0)
    before = table.weight.detach().clone()
    optimizer = small.sgd(table)
    if hvd.rank() == 0:
        table(torch.tensor([1, 4])).sum().backward()
        if clip:
            table.weight.grad.mul_(0.5)
    if clip:
        with pytest.raises(ValueError, match="the gradient of 'weight' is not equal on all ranks"):
            optimizer.step()
        small.assert_close([table.weight], [before])
    else:
        optimizer.step()
        moved = torch.zeros(6, 2, dtype=torch.float64)
        moved[[1, 4]] = 0.1 / 2
        small.assert_close([table.weight], [before - moved])


@on("ranks2_in_backward")
def test_a_backward_more_on_one_rank_does_not_meet_that_of_the_next_step() -> None:
    model, optimizer = small.made()
    small.make_loss(model, hvd.rank()).backward()
    if hvd.rank() == 1:
        optimizer.step()
        optimizer.zero_grad()
    told = r"rank 0 has called backward\(\) once more since its last optimizer\.step\(\).*rank 1"
    with pytest.raises(ValueError, match=told):
        small.make_loss(model, hvd.rank(), 1).backward()


@on_own(2, HORO_OVERLAP="always", HORO_GRADIENTS_READY="backward")
def test_a_second_backward_after_one_that_another_rank_has_joined_from_its_step_is_an_error() -> None:
    model, optimizer = small.made()
    if hvd.rank() == 0:
        small.make_loss(model, 0).backward()
        with pytest.raises(ValueError, match=r"rank 1 .* waits in optimizer\.step\(\)"):
            small.make_loss(model, 0).backward()
        hvd.shutdown()
    else:
        with pytest.raises(hvd.HorovodInternalError):
            optimizer.step()


@on("ranks2_in_backward")
def test_who_comes_late_costs_one_request_in_later_steps() -> None:
    model, optimizer = small.made()
    assert isinstance(optimizer._reducer, BackwardReducer)
    optimizer.step()  # the first reduction has one request more
    counts = []
    for step in range(6):
        optimizer.zero_grad()
        before = runtime.current().core.counters()["requests"]
        if step % 3 == 0 or (step % 3 == 1 and hvd.rank() == 0):
            small.make_loss(model, hvd.rank(), step).backward()
        optimizer.step()
        counts.append(runtime.current().core.counters()["requests"] - before)
    # First, all four gradients again, what each rank has sent for them, and the comparison; besides that of the
    # first three reductions. From then on, which of them each rank has used; and the second time the same for the
    # first gradient only.
    assert counts == [4, 14, 5, 5, 8, 5]


@on("ranks2_in_each_order")
def test_sparse_gradients_that_a_rank_lacks_are_averaged_where_ranks_have_other_orders() -> None:
    """Ranks ask each other about two gradients of one optimizer, and about those of two optimizers of one loss."""

    def make(seed: int) -> torch.nn.ModuleDict:
        torch.manual_seed(seed)
        names = [f"t{seed}{k}" for k in range(2)]
        return torch.nn.ModuleDict({name: torch.nn.Embedding(6, 2, sparse=True) for name in names}).double()

    models = [make(1), make(2)]
    rank = hvd.rank()
    optimizers = []
    for model in models if rank == 0 else models[::-1]:
        order = list(model.parameters())[:: 1 if rank == 0 else -1]
        optimizers.append(hvd.DistributedOptimizer(torch.optim.SGD(order, lr=0.1), model))
    extra = torch.ones(1, requires_grad=True)
    tables = [table for model in models for table in model.values()]
    wanted = [table.weight.detach().clone() for table in tables]
    for step in range(3):
        rows = torch.tensor([step])
        used = tables if rank == step % 2 else tables[1::2]  # a backward with no parameter of a model joins later
        (sum(table(rows).sum() for table in used) + extra.sum()).backward()
        for optimizer in sorted(optimizers, key=lambda item: item._reducer.membership.label):
            optimizer.step()
            optimizer.zero_grad()
        for number, value in enumerate(wanted):
            value[step] -= 0.1 if number % 2 else 0.1 / 2
        small.assert_close([table.weight.detach() for table in tables], wanted)


Record = list[torch.Tensor | None]
Use = Callable[[int, int], list[int]]
"""The parts that a rank uses in a step."""
PARTS = 4
STEPS = 6
MAKES: dict[str, Callable[[torch.nn.ModuleList], torch.optim.Optimizer]] = {
    "adamw": lambda parts: torch.optim.AdamW(parts.parameters(), lr=0.1, weight_decay=0.3),
    "momentum_sgd": lambda parts: torch.optim.SGD(parts.parameters(), lr=0.1, momentum=0.9, weight_decay=0.3),
    "sparse_adam": lambda parts: torch.optim.SparseAdam(list(parts.parameters()), lr=0.1),
    "plain_sgd": lambda parts: torch.optim.SGD(parts.parameters(), lr=0.1),
}
SINGLE_PRECISION = small.compressor(lambda t: t.float(), lambda t, _: t.double())


def make_parts(sparse: bool = False) -> torch.nn.ModuleList:
    torch.manual_seed(0)
    kind = torch.nn.Embedding(9, 3, sparse=True) if sparse else torch.nn.Linear(4, 3)
    return torch.nn.ModuleList(copy.deepcopy(kind) for _ in range(PARTS)).double()


def loss_of(parts: torch.nn.ModuleList, used: list[int], rank: int, step: int) -> torch.Tensor:
    """The loss of a rank. It is a constant where the rank uses no part."""
    batch = small.make_batch(rank, step)
    if isinstance(parts[0], torch.nn.Embedding):
        batch = (batch * 4).abs().long() % 9
    loss = torch.zeros((), dtype=torch.float64, requires_grad=True).clone()
    for index in used:
        loss = loss + parts[index](batch).square().mean()
    return loss


USES: dict[str, Use] = {
    "by_no_rank": lambda rank, step: [0],
    "by_one_rank": lambda rank, step: [0, 1] if rank == 1 else [0],
    # Part 0 all ranks, 1 all in some steps, 2 one rank in some steps, 3 the ranks in turn, and none before.
    "by_step": lambda rank, step: [
        *([0, 1] if step % 2 else [0]),
        *([2] if step in {1, 4} and rank == 0 else []),
        *([3] if rank == step - 3 else []),
    ],
    # A rank without any part takes part from its step().
    "by_nobody_at_first": lambda rank, step: [] if step < 2 or (step == 3 and rank == 0) else [rank % PARTS],
}


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
    make: str, use: str, *, sparse: bool = False, in_no_sync: bool = False, tolerance: float = 1e-9, **given: Any
) -> None:
    """On every rank: trains alone with all batches, then together, and compares each step."""
    loop = {name: given.pop(name) for name in ("passes", "set_to_none") if name in given}
    loop["is_sum"] = given.get("op") == hvd.Sum
    alone = make_parts(sparse)
    wanted = list(train(alone, MAKES[make](alone), USES[use], list(range(hvd.size())), **loop))
    parts = make_parts(sparse)
    optimizer = hvd.DistributedOptimizer(MAKES[make](parts), parts.named_parameters(), **given)
    if in_no_sync:
        loop["local"] = optimizer.no_sync
    found = train(parts, optimizer, USES[use], [hvd.rank()], **loop)
    for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None), f"step {step}: {ours} instead of {theirs}"
            if one is not None:
                torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=f"{step}: {one} != {other}")


pools = one_of("ranks2_always", "ranks2_never", "ranks4_always")
by_use = pytest.mark.parametrize("use", USES)


@by_use
@pytest.mark.parametrize("make", ["adamw", "momentum_sgd"])
@on("pools")
def test_a_step_moves_what_it_moves_in_one_process(make: str, use: str) -> None:
    compare(make, use)


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2}, {"op": hvd.Sum}, {"op": hvd.Sum, "passes": 3}, {"gradient_predivide_factor": 2.0},
        {"passes": 3}, {"passes": 3, "backward_passes_per_step": 3}, {"passes": 3, "backward_passes_per_step": 2},
        {"passes": 3, "in_no_sync": True}, {"set_to_none": False},
        {"compression": hvd.Compression.bf16, "tolerance": 0.02}, {"compression": SINGLE_PRECISION, "tolerance": 1e-5},
    ],
    ids=str,
)  # fmt: skip
@on("ranks2_always")
def test_so_it_does_with_options(options: dict[str, Any]) -> None:
    compare("momentum_sgd", "by_step", **options)


@by_use
@on("ranks2_in_backward")
def test_so_it_does_with_sparse_gradients(use: str) -> None:
    compare("sparse_adam", use, sparse=True)
    compare("plain_sgd", use, sparse=True, sparse_as_dense=True)


@on("ranks2")
def test_what_all_ranks_or_none_use_costs_nothing() -> None:
    parts = make_parts()
    optimizer = hvd.DistributedOptimizer(MAKES["momentum_sgd"](parts), parts.named_parameters())
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
    optimizer = hvd.DistributedOptimizer(MAKES["plain_sgd"](parts), parts.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(parts, USES["by_one_rank"](hvd.rank(), step), hvd.rank(), step).backward()
        optimizer.step()
        assert [bool(part.weight.grad.any()) for part in parts] == [True, True, False, False]
