"""Tensors that are not in host memory: torch's NCCL gets them, here a stand-in, and without it they are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import on


class StandIn:
    """In NCCL's place: notes the name of each call, and does nothing."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def note(*args: Any, **options: Any) -> Any:
            self.called.append(name)
            return SimpleNamespace(wait=lambda: True)

        return note


def call_all(device: str) -> None:
    """Each operation, with tensors on a device."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def ones(count: int = 2) -> torch.Tensor:
        return torch.ones(count, device=device)

    dist.all_reduce(ones())
    dist.all_reduce_coalesced([ones(), ones()])
    dist.broadcast(ones(), 0)
    dist.reduce(ones(), 0)
    dist.all_gather([ones() for _ in range(size)], ones())
    dist.all_gather_into_tensor(ones(2 * size), ones())
    dist.gather(ones(), [ones() for _ in range(size)] if rank == 0 else None, 0)
    dist.scatter(ones(), [ones() for _ in range(size)] if rank == 0 else None, 0)
    dist.reduce_scatter(ones(), [ones() for _ in range(size)])
    dist.reduce_scatter_tensor(ones(), ones(2 * size))
    dist.all_to_all([ones() for _ in range(size)], [ones() for _ in range(size)])
    dist.all_to_all_single(ones(size), ones(size))


@on("group2")
def test_each_operation_goes_to_the_backend_of_its_device() -> None:
    stand_in, other = StandIn(), 1 - dist.get_rank()
    names = ["allreduce", "allreduce", "broadcast", "reduce", "allgather", "all_gather_single", "gather", "scatter"]
    names += ["reduce_scatter", "reduce_scatter_single", "alltoall", "all_to_all_single", "send", "recv"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.group.WORLD.other_devices, "group", lambda device: stand_in)
        call_all("meta")
        dist.isend(torch.ones(1, device="meta"), other)
        dist.irecv(torch.ones(1, device="meta"), other)
        call_all("cpu")
    assert stand_in.called == names


@on("group2")
def test_tensors_of_other_devices_are_refused_where_torch_has_no_nccl() -> None:
    with pytest.raises(NotImplementedError, match=r"the tensor is on meta: .* no NCCL, or no GPU"):
        dist.all_reduce(torch.ones(2, device="meta"))
    if not torch.cuda.is_available():
        with pytest.raises(NotImplementedError, match=r"the tensor is on cuda: .* no NCCL, or no GPU"):
            dist.group.WORLD._get_backend(torch.device("cuda"))
    dist.barrier()


@on("fresh_group2")
def test_one_name_for_each_device() -> None:
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    again = dist.PrefixStore("for each device", store)
    dist.destroy_process_group()
    dist.init_process_group("cpu:horo,cuda:nccl", store=again, rank=rank, world_size=size)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 2
    dist.destroy_process_group()
