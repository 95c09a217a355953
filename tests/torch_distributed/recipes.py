"""What is built on torch.distributed, over the backend "horo" (or another one), on each rank of a job.

    hororun -np 2 python tests/torch_distributed/recipes.py [--backend horo] [NAME ...]

Each recipe checks its result against one process that does the same by itself.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def alone(make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1)) -> nn.Module:
    """The model after training on the batches of all ranks in one process."""
    whole = model()
    optimizer = make(whole.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [whole(batch(step, rank)).square().mean() for rank in range(dist.get_world_size())]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return whole


def train(wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(batch(step, dist.get_rank())).square().mean().backward()
        optimizer.step()


def same(got: nn.Module, want: nn.Module, tolerance: float = 1e-5) -> None:
    for one, other in zip(got.parameters(), want.parameters(), strict=True):
        value = one.full_tensor() if isinstance(one, DTensor) else one
        torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance)


def ddp(**options: Any) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(model(), **options)
    train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    same(wrapped.module, alone())
    return wrapped


def recipe_ddp() -> None:
    ddp()


def recipe_ddp_with_small_buckets() -> None:
    ddp(bucket_cap_mb=0.001, gradient_as_bucket_view=True)


def recipe_ddp_static_graph() -> None:
    ddp(static_graph=True)


def recipe_ddp_find_unused() -> None:
    ddp(find_unused_parameters=True)


def recipe_ddp_sparse() -> None:
    ranks = dist.get_world_size()
    table = nn.Embedding(ranks + 1, 4, sparse=True)
    wrapped = DistributedDataParallel(table)
    wrapped(torch.tensor([dist.get_rank(), ranks])).sum().backward()
    assert table.weight.grad is not None
    want = torch.tensor([[1 / ranks]] * ranks + [[1.0]]).expand(-1, 4)
    torch.testing.assert_close(table.weight.grad.to_dense(), want)


def recipe_ddp_of_one_rank() -> None:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    wrapped, plain = DistributedDataParallel(model(), process_group=groups[dist.get_rank()]), model()
    for each in (wrapped, plain):
        train(each, torch.optim.SGD(each.parameters(), lr=0.1))
    same(wrapped.module, plain)
    for group in groups:
        dist.destroy_process_group(group)


def recipe_ddp_hooks() -> None:
    for hook in (default_hooks.fp16_compress_hook, default_hooks.allreduce_hook):
        wrapped = DistributedDataParallel(model())
        wrapped.register_comm_hook(None, hook)
        train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
        same(wrapped.module, alone(), tolerance=1e-2)


def recipe_ddp_power_sgd() -> None:
    wrapped = DistributedDataParallel(model())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    equal_on_all(wrapped.module)


def recipe_ddp_uneven_inputs() -> None:
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with Join([wrapped]):
        for step in range(STEPS + dist.get_rank()):
            optimizer.zero_grad()
            wrapped(batch(step, dist.get_rank())).square().mean().backward()
            optimizer.step()
    equal_on_all(wrapped.module)


def recipe_fsdp1() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    with FullyShardedDataParallel.summon_full_params(wrapped):
        same(wrapped, alone())


def recipe_fsdp2() -> None:
    wrapped = model()
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in wrapped:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(wrapped, mesh=mesh)
    train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    same(wrapped, alone())


def recipe_tensor_parallel() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    whole = model()
    split = parallelize_module(copy.deepcopy(whole), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.testing.assert_close(split(batch(0, 0)), whole(batch(0, 0)))


def recipe_dtensor() -> None:
    size = dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    whole = torch.arange(float(4 * size * 3)).view(4 * size, 3)
    shard = distribute_tensor(whole, mesh, [Shard(0)])
    assert shard.to_local().shape == (4, 3)
    torch.testing.assert_close(shard.redistribute(placements=[Replicate()]).to_local(), whole)
    torch.testing.assert_close((shard.T @ shard).full_tensor(), whole.T @ whole)


def recipe_functional_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    ones = torch.full((2 * size, 3), float(rank + 1))
    assert functional.all_reduce(ones, "sum", group)[0, 0].item() == size * (size + 1) / 2
    assert functional.all_gather_tensor(ones, 0, group)[::2, 0].tolist() == [
        1.0 + i // size for i in range(size * size)
    ]
    assert functional.reduce_scatter_tensor(ones, "sum", 0, group).tolist() == [[size * (size + 1) / 2] * 3] * 2
    assert functional.all_to_all_single(ones, None, None, group)[-1, 0].item() == size
    assert functional.broadcast(ones, size - 1, group)[0, 0].item() == size

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(tensor: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(tensor * 2, "sum", group) + 1

    assert compiled(torch.ones(3))[0].item() == 2 * size + 1


def recipe_zero() -> None:
    wrapped = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    train(wrapped, optimizer)
    same(wrapped.module, alone(lambda p: torch.optim.Adam(p, lr=0.01)))
    optimizer.consolidate_state_dict(to=0)


def recipe_distributed_checkpoint() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    want = distribute_tensor(torch.arange(64.0).view(16, 4), mesh, [Shard(0)])
    state = {"sharded": want, "plain": torch.full((3,), 5.0), "step": 7}
    checkpoint.save(state, checkpoint_id=folder[0])
    empty = {"sharded": distribute_tensor(torch.zeros(16, 4), mesh, [Shard(0)]), "plain": torch.zeros(3), "step": 0}
    checkpoint.load(empty, checkpoint_id=folder[0])
    torch.testing.assert_close(empty["sharded"].full_tensor(), want.full_tensor())
    assert (empty["plain"].tolist(), empty["step"]) == ([5.0] * 3, 7)


def equal_on_all(module: nn.Module) -> None:
    """Parameters have the same bits on all ranks."""
    flat = torch.cat([each.detach().flatten() for each in module.parameters()])
    first = flat.clone()
    dist.broadcast(first, 0)
    assert torch.equal(flat, first)


RECIPES = {name.removeprefix("recipe_"): each for name, each in globals().items() if name.startswith("recipe_")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="horo")
    parser.add_argument("names", nargs="*", choices=[[], *RECIPES])
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(given.backend)
    for name in given.names or RECIPES:
        RECIPES[name]()
        if dist.get_rank() == 0:
            print(f"ok {name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
