"""The inputs of a step besides gradients: the loss scale of a GradScaler, the options of the optimizer.

Ranks that part in them hold different parameters from then on, and nothing else shows it: gradients stay equal. So they
are compared now and then. That is done in the next reduction, where all ranks meet in any case: a rank that leaves out
a ``step()`` would be waited for inside it.
"""

from __future__ import annotations

import inspect
import warnings
import zlib
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from horo.errors import UsageError
from horo.horovod import is_installed
from horo.torch.compat.torch_private import calls_scaled_step
from horo.torch.functions.objects import gather_objects
from horo.torch.ops.process_set import ProcessSet, resolve_process_set
from horo.torch.optimizer.comparison import ABSENT, Comparison

__all__ = ["InputsCheck", "StepInputs", "callers", "scaler_of_step"]

_SCALER_FRAMES = 14
"""The most frames between here and a GradScaler: torch's and a scheduler's wrappers of ``step`` lie between."""
_SCALER_METHODS = ("get_scale", "unscale_", "is_enabled", "state_dict")
"""Methods of a GradScaler. A scaler of the user's own that lacks one is not compared."""
_SCALER_STATE = ("growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_SCALE = "loss scale"
_OPTIONS = ("lr", "momentum", "betas", "weight_decay")
"""The options that schedulers change."""
_ABSENT = ("", "not there")
_SCALER_ADVICE = (
    "give all ranks the GradScaler of one, after a resume and after hvd.join(): "
    "scaler.load_state_dict(hvd.broadcast_object(scaler.state_dict(), root_rank))"
)
_OPTION_ADVICE = (
    "give all ranks the scheduler of one, after a resume and after hvd.join(), by hvd.broadcast_object() of its "
    "state_dict(), and let it decide by what is equal on all ranks, as hvd.allreduce(loss)"
)


def callers() -> Iterator[FrameType]:
    """The frames in which a GradScaler that calls a step may be found, the nearest first."""
    frame = inspect.currentframe()
    for _ in range(_SCALER_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def scaler_of_step() -> Any:
    """The enabled GradScaler that calls the optimizer's step in progress, or None. Only the call stack shows it."""
    for frame in callers():
        if frame.f_code.co_name == "step" or calls_scaled_step(frame):
            found: Any = frame.f_locals.get("self")
            if all(hasattr(found, method) for method in _SCALER_METHODS):
                return found if found.is_enabled() else None
    return None


class StepInputs:
    """The inputs of a step, of a GradScaler and of an optimizer: by name what is compared, and the value to show."""

    def __init__(self, scaler: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
        values: dict[str, Any] = {} if scaler is None else _named(scaler)
        for number, group in enumerate(optimizer.param_groups if optimizer else ()):
            values |= {f"{key!r} of parameter group {number}": group[key] for key in _OPTIONS if key in group}
        self.values = {name: (_rounded(value), str(value)) for name, value in values.items() if _rounded(value)}

    @property
    def checksum(self) -> int:
        """A checksum of what is compared; ABSENT without any."""
        compared = [(name, compared) for name, (compared, _) in self.values.items()]
        return zlib.crc32(repr(compared).encode()) if compared else ABSENT

    def refuse(self, label: str, process_set: ProcessSet) -> None:
        """Called on all ranks where they differ. Under Horovod's names it is a warning, as for parameters.

        Raises:
            UsageError: The sentence has the values of two ranks.
        """
        message = _difference(gather_objects(self.values, f"{label}.check.values", process_set))
        if not is_installed():
            raise UsageError(message)
        warnings.warn(message, stacklevel=2)


class InputsCheck:
    """Compares the inputs of the last step over all ranks, in one small allreduce beside that of the gradients.

    Args:
        label: What the names of the operations begin with.
        inputs: Those of this rank.
        process_set: The ranks that take part.
    """

    def __init__(self, label: str, inputs: StepInputs, process_set: ProcessSet) -> None:
        self._label = label
        self._inputs = inputs
        self._process_set = process_set
        team = resolve_process_set(process_set, "DistributedOptimizer")
        self._comparison = Comparison(f"{label}.check", "inputs", {"": inputs.checksum}, team)
        self.request = self._comparison.request

    def finish(self) -> None:
        """Waits.

        Raises:
            UsageError: As ``StepInputs.refuse``.
        """
        if self._comparison.finish():
            self._inputs.refuse(self._label, self._process_set)


def _rounded(value: Any) -> str:
    """A number, or several, to six digits: hosts with other processors may have computed another last one.

    Empty for all else, and for a tensor on a GPU, which would be waited for, even while a CUDA graph is captured.
    """
    if isinstance(value, (list, tuple)):
        return " ".join(map(_rounded, value))
    if isinstance(value, torch.Tensor) and value.is_cpu and value.numel() == 1:
        value = value.item()
    return f"{value:.6g}" if isinstance(value, (int, float)) else ""


def _named(scaler: Any) -> dict[str, Any]:
    """The scale and the state of a GradScaler, in words; the scale first."""
    state = scaler.state_dict()  # of a subclass it may have another form
    others = {
        f"GradScaler's {name.strip('_').replace('_', ' ')}": state[name] for name in _SCALER_STATE if name in state
    }
    return {_SCALE: scaler.get_scale(), **others}


def _difference(everyone: Mapping[int, Mapping[str, tuple[int, str]]]) -> str:
    """The first difference, and what removes it. By rank and name: what is compared, and the value."""
    there_are = {rank: values for rank, values in everyone.items() if values}
    first, ours = next(iter(there_are.items()))
    for rank, theirs in there_are.items():
        for name in [*ours, *theirs]:
            here, there = ours.get(name, _ABSENT), theirs.get(name, _ABSENT)
            if here[0] != there[0]:
                return (
                    f"optimizer.step(): the {name} is {here[1]} on rank {first} and {there[1]} on rank {rank}, so "
                    f"parameters part; {_OPTION_ADVICE if ' of parameter group ' in name else _SCALER_ADVICE}"
                )
    raise RuntimeError("ranks had different inputs of a step, and now they have not")
