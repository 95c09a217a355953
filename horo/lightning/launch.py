"""Ranks for a script that no launcher has started: ``horo.run`` starts them, with copies of the Trainer or Fabric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horo.torch as hvd
from horo.errors import UsageError
from horo.lightning.place import Base

__all__ = ["FabricRanks", "TrainerRanks", "be_rank"]


class _Ranks(Base):
    """Stands in for Lightning's launchers by ``multiprocessing``, with their way to bring results back."""

    states_class: Any
    is_interactive_compatible = True
    """``horo.run`` works in notebooks."""

    def _start(self, trainer: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of rank 0; blocks until all ranks have ended."""
        from horo.runner.call import run  # noqa: PLC0415  (only where this process starts ranks)

        count = self._strategy.num_processes
        given = (self, trainer, self.states_class.capture(), function, (args, kwargs))
        outcomes = run(be_rank, given, num_proc=count, hosts=f"localhost:{count}", options=["--no-prefix"])
        return outcomes[0]


class TrainerRanks(_Ranks):
    """Starts the ranks of a Trainer for one call, such as ``fit``.

    The ranks have copies of the Trainer, the module and the data, and begin with the random state of this process. The
    weights, the metrics and the path of the best checkpoint come back.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """The result of ``function`` in rank 0; blocks until all ranks have ended.

        Raises:
            UsageError: A second ``fit`` of one Trainer: the state of its loops has ended with the ranks of the first.
        """
        if trainer is None:
            return self._start(None, function, args, kwargs)
        is_fit = trainer.state.fn == "fit"
        if is_fit and self._already_fit:
            raise UsageError(
                "Trainer.fit: the ranks of the first fit() have ended, with the state of its loops; make another "
                "Trainer and give fit(ckpt_path=...), or start the script with hororun"
            )
        output = self._start(trainer, function, args, kwargs)
        self._already_fit |= is_fit
        self._recover_results_in_main_process(output, trainer)
        return output.trainer_results


class FabricRanks(_Ranks):
    """Starts the ranks of Fabric for one ``fabric.launch(function)``."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of ``function`` in rank 0; blocks until all ranks have ended."""
        return self._start(None, function, args, kwargs)


def be_rank(launcher: Any, trainer: Any, states: Any, function: Callable[..., Any], call: Any) -> Any:
    """Runs in each started rank; only rank 0 returns something."""
    states.restore()
    launcher._strategy.join_job()
    args, kwargs = call
    results = function(*args, **kwargs)
    if trainer is not None:
        results = launcher._collect_rank_zero_results(trainer, results)
    return results if hvd.rank() == 0 else None
