"""The strategy of Lightning's Fabric."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import horo.torch as hvd
from horo.lightning import collectives
from horo.lightning.layers import check_buffers, equalize_buffers
from horo.lightning.metrics import synchronize_metrics
from horo.lightning.optimizers import accumulate_locally, check_options, distribute
from horo.lightning.place import Member

__all__ = ["FabricStrategy"]


class FabricStrategy(Member):
    """``Fabric(strategy=HoroFabricStrategy(...))``: each rank has a whole model, and gradients are averaged.

    Under hororun, torchrun, srun or mpirun the ranks are those of the launcher. Without one,
    ``Fabric(devices=4).launch(function)`` starts four ranks on this host by ``horo.run``.

    Args:
        buffers: How ranks get equal buffers before ``fabric.save()``: ``"average"``, ``"broadcast"`` (those of rank 0)
            or ``"local"`` (they do not). Before validation, call ``hvd.average_buffers(model)``.
        accelerator: As for other strategies of Lightning.
        parallel_devices: As for other strategies of Lightning.
        checkpoint_io: As for other strategies of Lightning.
        precision: As for other strategies of Lightning.
        options: Of ``hvd.DistributedOptimizer``: ``compression``, ``op``, ``gradient_predivide_factor``, ``groups``,
            ``sparse_as_dense``, ``sharding``.

    Raises:
        UsageError: An argument is something else; ``devices`` or ``num_nodes`` contradict the launcher.
    """

    def __init__(
        self,
        buffers: str = "average",
        *,
        accelerator: Any = None,
        parallel_devices: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=self.environment_class(),
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        self._buffers = check_buffers(buffers)
        self._options = check_options(options)
        self._distributed: list[torch.optim.Optimizer] = []
        self._backward_sync_control = self

    def _set_world_ranks(self) -> None:
        self.join_job()

    def module_to_device(self, module: torch.nn.Module) -> None:
        """Moves a model to the device of this rank."""
        module.to(self.root_device)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Gives all ranks the parameters of rank 0; blocks until all ranks have called it."""
        hvd.broadcast_parameters(module, root_rank=0)
        synchronize_metrics(module)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Has an optimizer average gradients; blocks until all ranks have called it."""
        self._distributed.append(distribute(optimizer, None, self._options))
        return optimizer

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """A context in which backward passes through ``module`` only accumulate, if ``enabled``."""
        if not enabled:
            return nullcontext()
        own = set(module.parameters())
        return accumulate_locally(
            optimizer
            for optimizer in self._distributed
            if any(parameter in own for group in optimizer.param_groups for parameter in group["params"])
        )

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor in place over all ranks; blocks until all ranks have called it."""
        return collectives.reduce(tensor, group, reduce_op)

    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """The state for a checkpoint, with equal buffers; blocks until all ranks have called it."""
        equalize_buffers(module, self._buffers)
        state: dict[str, Any] = super().get_module_state_dict(module)
        return state
