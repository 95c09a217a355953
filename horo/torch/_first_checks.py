"""What is checked once, when the gradients of an optimizer are reduced for the first time."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import torch

from horo.errors import UsageError
from horo.torch._comparison import Comparison, checksum
from horo.torch._gradients import Slot

__all__ = ["ParameterCheck", "refuse_ddp", "refuse_ddp_model"]


class ParameterCheck:
    """Compares a checksum of each parameter over all ranks, in one small allreduce.

    Ranks that start from different parameters stay apart for ever, since they add the same gradients to them.
    """

    def __init__(self, label: str, slots: Sequence[Slot]) -> None:
        self._count = len(slots)
        self._comparison = Comparison(
            f"{label}.check", "parameters", {slot.name: checksum(slot.parameter) for slot in slots}
        )
        self.request = self._comparison.request

    def finish(self) -> None:
        """Waits.

        Raises:
            UsageError: Ranks have different parameters; the sentence names the first.
        """
        different = self._comparison.finish()
        if different:
            raise UsageError(
                f"parameter {different[0]!r} is not equal on all ranks before the first step "
                f"({len(different)} of {self._count} parameters are not); call "
                "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before training begins"
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
