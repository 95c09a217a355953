"""The strategy of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

import horo.torch as hvd
from horo.lightning import collectives
from horo.lightning.layers import BatchNormSwap, check_buffers, equalize_buffers
from horo.lightning.metrics import synchronize_metrics
from horo.lightning.optimizers import accumulate_locally, check_options, distribute, scale_learning_rates
from horo.lightning.place import Member

__all__ = ["TrainerStrategy"]


def _has_tensor(entry: tuple[str, Any]) -> bool:
    return isinstance(entry[1], torch.Tensor)


class TrainerStrategy(Member):
    """``Trainer(strategy=HoroStrategy(...))``: each rank has a whole model, and gradients are averaged over all ranks.

    Under hororun, torchrun, srun or mpirun the ranks are those of the launcher. Without one, ``Trainer(devices=4)``
    starts four ranks on this host by ``horo.run``, for each ``fit``, ``validate``, ``test`` and ``predict``.

    Args:
        buffers: How ranks get equal buffers, such as the running statistics of BatchNorm, before they validate, test,
            predict and save: ``"average"``, ``"broadcast"`` (those of rank 0) or ``"local"`` (they do not).
        scale_lr: Whether to multiply learning rates by the number of ranks.
        accelerator: As for other strategies of Lightning.
        parallel_devices: As for other strategies of Lightning.
        checkpoint_io: As for other strategies of Lightning.
        precision_plugin: As for other strategies of Lightning.
        options: Of ``hvd.DistributedOptimizer``: ``compression``, ``op``, ``gradient_predivide_factor``, ``groups``,
            ``sparse_as_dense``, ``sharding``.

    Raises:
        UsageError: An argument is something else; ``devices`` or ``num_nodes`` contradict the launcher.
    """

    strategy_name = "horo"
    reset_seed: Any
    _layer_sync: Any
    model: Any

    def __init__(
        self,
        buffers: str = "average",
        scale_lr: bool = False,
        *,
        accelerator: Any = None,
        parallel_devices: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=self.environment_class(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._buffers = check_buffers(buffers)
        self._scale_lr = scale_lr
        self._options = check_options(options)

    def set_world_ranks(self) -> None:
        """Comes into the job; Lightning calls it when the Trainer is made, so that the first log is of one rank."""
        self.join_job()

    def setup_environment(self) -> None:
        """Chooses the device, and begins the random numbers of ``seed_everything`` anew, as Lightning's strategies."""
        super().setup_environment()
        self.reset_seed()

    def setup(self, trainer: Any) -> None:
        """Makes layers, parameters and optimizers ready; blocks until all ranks are here."""
        if trainer.state.fn == "fit" and self._layer_sync is not None:
            if type(self._layer_sync).__name__ == "TorchSyncBatchNorm":
                self._layer_sync = BatchNormSwap()
            self.model = self._layer_sync.apply(self.model)
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Moves the model to the device of this rank."""
        self.model.to(self.root_device)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        state = model.state_dict(keep_vars=True)
        if any(isinstance(value, list) for value in state.values()):  # of a metric that keeps its samples
            hvd.broadcast_parameters(list(filter(_has_tensor, state.items())), root_rank=0)
        else:
            hvd.broadcast_parameters(model, root_rank=0)
        synchronize_metrics(model)
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the optimizers of the module, and has them average gradients."""
        super().setup_optimizers(trainer)
        for optimizer in self._optimizers:
            distribute(optimizer, self.lightning_module, self._options)
        if self._scale_lr:
            schedulers = [config.scheduler for config in self.lr_scheduler_configs]
            scale_learning_rates(self._optimizers, schedulers, hvd.size())
        self.optimizers = self._optimizers  # Lightning's wrappers copy the attributes of what they wrap

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the state of the optimizers from a checkpoint; all ranks get that of rank 0."""
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self._optimizers:
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """A context of passes that only accumulate."""
        return accumulate_locally(self._optimizers)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor in place over all ranks; blocks until all ranks have called it."""
        return collectives.reduce(tensor, group, reduce_op)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, with equal buffers; blocks until all ranks have called it."""
        self._equalize_buffers()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def on_train_start(self) -> None:
        """Finds the metrics that hooks have made since the setup."""
        synchronize_metrics(self.lightning_module)

    def on_validation_start(self) -> None:
        """Makes buffers equal, and finds metrics."""
        self._equalize_buffers()
        synchronize_metrics(self.lightning_module)

    def on_test_start(self) -> None:
        """As before validation."""
        self.on_validation_start()

    def on_predict_start(self) -> None:
        """As before validation."""
        self.on_validation_start()

    def _equalize_buffers(self) -> None:
        equalize_buffers(self.lightning_module, self._buffers)

    def teardown(self) -> None:
        """Gives the model its own layers back, and moves it to the CPU."""
        if isinstance(self._layer_sync, BatchNormSwap) and self.model is not None:
            self.model = self._layer_sync.revert(self.model)
        super().teardown()
