"""Makes our classes for one of Lightning's two packages, whose base classes are different objects."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from horo.lightning.fabric_strategy import FabricStrategy
from horo.lightning.launch import FabricRanks, TrainerRanks
from horo.lightning.neptune import NeptuneLogs
from horo.lightning.place import Environment
from horo.lightning.trainer_strategy import TrainerStrategy

__all__ = ["NAMES", "make_classes"]

NAMES = ("horo", "horovod", "bagua")
"""Of the strategies; the last two are names that scripts for Lightning 1 have."""

_LAUNCHERS = "strategies.launchers.multiprocessing"


def make_classes(module: str, trainer: str, fabric: str) -> tuple[dict[str, Any], tuple[Any, Any]]:
    """Our classes by name, and the registries of strategies of the Trainer and of Fabric.

    Args:
        module: The module that will have the classes, by which pickle finds them.
        trainer: The package with the Trainer.
        fabric: The package with Fabric.
    """
    trainers, fabrics = import_module(f"{trainer}.strategies"), import_module(f"{fabric}.strategies")
    environments = import_module(f"{fabric}.plugins.environments")
    launchers = [import_module(f"{package}.{_LAUNCHERS}") for package in (trainer, fabric)]
    bases: dict[str, tuple[type, type]] = {
        "HoroStrategy": (TrainerStrategy, trainers.ParallelStrategy),
        "HoroFabricStrategy": (FabricStrategy, fabrics.ParallelStrategy),
        "HoroEnvironment": (Environment, environments.ClusterEnvironment),
        "TrainerLauncher": (TrainerRanks, launchers[0]._MultiProcessingLauncher),
        "FabricLauncher": (FabricRanks, launchers[1]._MultiProcessingLauncher),
        "NeptuneLogger": (NeptuneLogs, import_module(f"{trainer}.loggers").Logger),
    }
    made: dict[str, Any] = {
        name: type(name, given, {"__module__": module, "__doc__": given[0].__doc__}) for name, given in bases.items()
    }
    for strategy, launcher in (("HoroStrategy", "TrainerLauncher"), ("HoroFabricStrategy", "FabricLauncher")):
        made[strategy].environment_class, made[strategy].launcher_class = made["HoroEnvironment"], made[launcher]
        made[launcher].states_class = launchers[1]._GlobalStateSnapshot
    made["HoroStrategy"].reset_seed = staticmethod(import_module(f"{fabric}.utilities.seed").reset_seed)
    experiment = import_module(f"{fabric}.loggers.logger").rank_zero_experiment(NeptuneLogs.make_run)
    made["NeptuneLogger"].experiment = property(experiment)
    for connector in (
        import_module(f"{trainer}.trainer.connectors.accelerator_connector")._AcceleratorConnector,
        import_module(f"{fabric}.connector")._Connector,
    ):
        _leave_places_to_horo(connector, made["HoroEnvironment"])
    _allow_compiled_modules(import_module(f"{trainer}.trainer.trainer"))
    return made, (trainers.StrategyRegistry, fabrics.STRATEGY_REGISTRY)


def _leave_places_to_horo(connector: Any, environment_class: Any) -> None:
    """Has the connector look for no launcher where the strategy is one of ours, which brings an environment along.

    Else Lightning looks before it asks the strategy. Under Slurm it refuses ``--ntasks``, and it asks MPI, which is an
    error where mpi4py finds none: as its wheels do on a machine without one.
    """
    choose = connector._choose_and_init_cluster_environment

    def chosen(self: Any) -> Any:
        return environment_class() if self._strategy_flag in NAMES else choose(self)

    connector._choose_and_init_cluster_environment = chosen


def _allow_compiled_modules(module: Any) -> None:
    """Has ``Trainer.fit`` take what ``torch.compile`` returns with our strategy: Lightning has a list of its own."""
    verify = module._verify_strategy_supports_compile

    def verified(model: Any, strategy: Any) -> None:
        if not isinstance(strategy, TrainerStrategy):
            verify(model, strategy)

    module._verify_strategy_supports_compile = verified
