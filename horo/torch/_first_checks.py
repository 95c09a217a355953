"""What is checked once, when the gradients of an optimizer are reduced for the first time."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterable, Sequence

import torch

from horo.errors import UsageError
from horo.torch._bytes import bytes_of
from horo.torch._gradients import Slot
from horo.torch._requests import start_allreduce
from horo.torch._staging import Spec
from horo.torch.ops import Max

__all__ = ["ParameterCheck", "refuse_ddp", "refuse_ddp_model"]


class ParameterCheck:
    """Compares a checksum of each parameter over all ranks, in one small allreduce.

    Ranks that start from different parameters stay apart for ever, since they add the same gradients to them.
    """

    def __init__(self, label: str, slots: Sequence[Slot]) -> None:
        self._names = [slot.name for slot in slots]
        sums = torch.tensor([_checksum(slot.parameter) for slot in slots], dtype=torch.int64)
        spec = Spec(f"{label}.check", "parameters", Max)
        self.request = start_allreduce([torch.cat([sums, -sums])], spec, sync=True)

    def finish(self) -> None:
        """Waits.

        Raises:
            UsageError: Ranks have different parameters; the sentence names the first.
        """
        (found,) = self.request.wait()
        highest, lowest = found.view(2, -1)
        different = (highest != -lowest).nonzero().flatten().tolist()
        if different:
            raise UsageError(
                f"parameter {self._names[different[0]]!r} is not equal on all ranks before the first step "
                f"({len(different)} of {len(self._names)} parameters are not); call "
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


def _checksum(parameter: torch.Tensor) -> int:
    return zlib.crc32(bytes_of(parameter.detach().contiguous()))
