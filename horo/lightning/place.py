"""The place of this process in its job, in Lightning's terms, and what ``devices=`` may say about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

import horo.torch as hvd
from horo.bootstrap.launchers.detect import rank_of_launcher
from horo.config.table import environment
from horo.errors import UnsupportedError, UsageError
from horo.lightning import collectives
from horo.torch.compat.rank_zero import tell_rank

__all__ = ["Base", "Environment", "Member", "announce_rank", "devices_of_ranks"]

if TYPE_CHECKING:

    class Base(Any):  # type: ignore[misc]
        """Stands for the class of Lightning that a class here is joined with, for type checkers only."""

else:
    Base = object


def announce_rank() -> None:
    """Tells ``rank_zero_only`` the rank that the launcher has given to this process: before ``init()``, from then on.

    Lightning knows the variables of some launchers only, and else every rank would log, and show a progress bar.
    """
    rank = hvd.rank() if hvd.is_initialized() else rank_of_launcher(environment())
    if rank is not None:
        tell_rank(rank)


class Environment(Base):
    """The cluster environment of a job of horo's: the launcher has started the ranks, or ``horo.run`` will.

    Args:
        ranks_to_start: The ranks that the launch will start; until then, this process is none of them.
    """

    creates_processes_externally = True

    def __init__(self, ranks_to_start: int = 1) -> None:
        super().__init__()
        self.ranks_to_start = ranks_to_start

    @staticmethod
    def detect() -> bool:
        """Whether this process is a rank, or a launcher has started it as one."""
        return hvd.is_initialized() or rank_of_launcher(environment()) is not None

    @property
    def main_address(self) -> str:
        """Has none: the address is for a process group of torch's, and horo does not use one."""
        raise UnsupportedError('strategy="horo" makes no process group of torch.distributed, so it has no address')

    @property
    def main_port(self) -> int:
        """As ``main_address``."""
        raise UnsupportedError('strategy="horo" makes no process group of torch.distributed, so it has no port')

    def world_size(self) -> int:
        """The ranks of the job."""
        return hvd.size() if hvd.is_initialized() else self.ranks_to_start

    def global_rank(self) -> int:
        """This process's number in the job."""
        return hvd.rank() if hvd.is_initialized() else 0

    def local_rank(self) -> int:
        """This process's number on its host."""
        return hvd.local_rank() if hvd.is_initialized() else 0

    def node_rank(self) -> int:
        """The number of this host."""
        return hvd.cross_rank() if hvd.is_initialized() else 0

    def set_world_size(self, size: int) -> None:
        """Does nothing: the launcher has decided."""

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the launcher has decided."""


class Member(Base):
    """The common part of the strategies of the Trainer and of Fabric: the way into the job, and its devices."""

    is_distributed = True
    environment_class: Any
    launcher_class: Any
    parallel_devices: Any

    _num_nodes = 1

    @property
    def num_nodes(self) -> int:
        """As the user gave it; 1 also leaves the number of hosts to the launcher."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """The ranks on this host."""
        return len(self.parallel_devices or ())

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The part of the data that belongs to this rank."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def join_job(self) -> None:
        """Calls ``init()``, and blocks until all ranks have; does nothing where the ranks are still to be started.

        Raises:
            UsageError: ``devices`` or ``num_nodes`` contradict the job, or several hosts are to be started.
        """
        devices = self.parallel_devices
        if not self.environment_class.detect() and (len(devices) > 1 or self._num_nodes > 1):
            if self._num_nodes > 1:
                raise UsageError(
                    f"num_nodes={self._num_nodes}, and no launcher has started this process: start the ranks of all "
                    "hosts with hororun -H, srun or torchrun"
                )
            self.cluster_environment.ranks_to_start = len(devices)
            return
        hvd.init()
        tell_rank(hvd.rank())
        if hvd.is_homogeneous() and self._num_nodes not in (1, hvd.cross_size()):
            raise UsageError(
                f"num_nodes={self._num_nodes}, but the launcher has started ranks on {hvd.cross_size()} hosts: leave "
                "num_nodes out"
            )
        self.parallel_devices = devices_of_ranks(devices, hvd.local_size())

    def setup_environment(self) -> None:
        """Chooses the device."""
        self.join_job()
        super().setup_environment()

    def _configure_launcher(self) -> None:
        if not hvd.is_initialized():
            self._launcher = self.launcher_class(self)

    def barrier(self, name: str | None = None) -> None:
        """Blocks until all ranks have come here."""
        if hvd.is_initialized():
            hvd.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank ``src`` on all; blocks until all ranks have called it."""
        return hvd.broadcast_object(obj, src) if hvd.is_initialized() else obj

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all ranks, ``[ranks, *shape]``; blocks until all ranks have called it."""
        return collectives.gather(tensor, group, sync_grads)


def devices_of_ranks(given: Sequence[torch.device], local_size: int) -> list[torch.device]:
    """The device of each rank of this host.

    Lightning has made a list of ``devices=``: of "auto", all GPUs that this process sees, or one CPU.

    Raises:
        UsageError: The number is another one.
    """
    first, count = given[0], len(given)
    if count == local_size:
        return list(given)
    if first.type != "cuda":
        if count == 1:
            return [first] * local_size
    elif count == torch.cuda.device_count() >= local_size:
        return list(given[:local_size])
    elif count == 1 and first.index in (0, None):
        visible = torch.cuda.device_count()
        if visible == 1:  # of each rank another one, or one that they share
            return [first] * local_size
        if visible >= local_size:
            return [torch.device("cuda", index) for index in range(local_size)]
    raise UsageError(
        f"devices={count} (first: {first}), but the launcher has started {local_size} ranks on this host: give "
        f'devices="auto" or devices={local_size}'
    )
