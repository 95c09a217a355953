"""What is checked once per parameter, when the gradients of an optimizer are reduced for the first time with it."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import torch

from horo.errors import UsageError
from horo.torch._comparison import Comparison, checksum, options_of
from horo.torch._gradients import Slot

__all__ = ["FirstCheck", "refuse_ddp", "refuse_ddp_model"]

_PARAMETER = "parameter "
_STATE = "state "


class FirstCheck:
    """Compares parameters, and what the optimizer knows of each, over all ranks, in one small allreduce.

    Ranks that start from different ones stay apart for ever, since they add the same gradients to them. Frozen
    parameters are compared too: ranks would compute the gradients of different models.
    """

    def __init__(self, label: str, slots: Sequence[Slot], optimizer: torch.optim.Optimizer) -> None:
        self._count = len(slots)
        self._parameters = {f"{_PARAMETER}{slot.name}": checksum(slot.parameter) for slot in slots}
        states = {f"{_STATE}{slot.name}": checksum(optimizer.state.get(slot.parameter, {})) for slot in slots}
        options = [{key: group[key] for key in optimizer.defaults if key in group} for group in optimizer.param_groups]
        self._comparison = Comparison(f"{label}.check", "parameters", self._parameters | states | options_of(options))
        self.request = self._comparison.request

    def finish(self) -> None:
        """Waits.

        Raises:
            UsageError: Ranks have different parameters, state or options; the sentence names the first.
        """
        different = self._comparison.finish()
        parameters = [name for name in different if name in self._parameters]
        if parameters:
            raise UsageError(
                f"parameter {parameters[0].removeprefix(_PARAMETER)!r} is not equal on all ranks before the first step "
                f"({len(parameters)} of {self._count} parameters are not); call "
                "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before training begins"
            )
        if different:
            what = different[0]
            if what.startswith(_STATE):
                what = f"the optimizer's state of parameter {what.removeprefix(_STATE)!r}"
            raise UsageError(
                f"{what}: not equal on all ranks before the first step, so they would do different steps; call "
                "hvd.broadcast_optimizer_state(optimizer, root_rank=0) before training begins"
            )


def refuse_ddp_model(model: torch.nn.Module) -> None:
    """Refuses a model that averages its gradients itself.

    Raises:
        UsageError: It is a ``DistributedDataParallel``, or has one inside.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise _refusal("the model")


def refuse_ddp(slots: Iterable[Slot]) -> None:
    """Refuses parameters of which a ``DistributedDataParallel`` anywhere in this process averages the gradients.

    Raises:
        UsageError: There is one.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return  # there can be none, and the search takes a while
    names = {slot.parameter: slot.name for slot in slots}
    for found in gc.get_objects():
        if issubclass(type(found), torch.nn.parallel.DistributedDataParallel):
            for parameter in found.parameters():
                if parameter in names:
                    raise _refusal(f"parameter {names[parameter]!r}")


def _refusal(what: str) -> UsageError:
    return UsageError(
        f"{what} is wrapped in DistributedDataParallel, which averages gradients itself; with DistributedOptimizer "
        "leave the model unwrapped, or use DistributedDataParallel and the plain optimizer"
    )
