"""The optimizers that can be sharded: those that step each parameter by itself, once per ``step()``."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from horo.errors import UnsupportedError, UsageError

__all__ = ["check_sharding", "is_of_torch", "steps_elements"]

_PROBE_SCALES = (1.0,) * 8 + (100.0,) * 2
"""Sizes of gradients, one a step: gradients of one direction, by which some estimate a step size for all parameters,
then large ones, which others clip together."""
_PROBE_SHAPES = ((3, 4), (4,), (2, 5), (6,))
_PROBE_LR = 1e-3
"""In the place of 0."""
_BY_ELEMENT = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "Adagrad", "Rprop", "ASGD")
"""Classes of ``torch.optim`` that step an element of a parameter by its own gradient and state alone."""
_NO_OPTIONS = ("params", "param_names")


def check_sharding(optimizer: torch.optim.Optimizer, sharding: Any, op: int, adasum: int) -> None:
    """Refuses what cannot be sharded.

    Args:
        optimizer: That of the user.
        sharding: As the user has given it, not None.
        op: The reduction of its gradients.
        adasum: The one for which there is no sharding.

    Raises:
        UsageError: ``sharding`` is no value of it.
        UnsupportedError: The optimizer, ``op`` or a parameter is not for it.
    """
    if sharding == "gradients":
        raise UnsupportedError(
            'DistributedOptimizer: sharding="gradients" is not offered; sharding="optimizer" averages gradients on '
            "every rank, and shards parameters, state and the step"
        )
    if sharding != "optimizer":
        raise UsageError(f"DistributedOptimizer: sharding must be None or 'optimizer', not {sharding!r}")
    if op == adasum:
        raise UnsupportedError("DistributedOptimizer: sharding= is not for op=Adasum, where each rank steps by itself")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type != "cpu":
                raise UnsupportedError(
                    f"DistributedOptimizer: a parameter of shape {list(parameter.shape)} is on {parameter.device}; "
                    "sharding= is for parameters in host memory"
                )
    if not hasattr(torch.optim.Optimizer, "register_load_state_dict_post_hook"):
        raise UnsupportedError(
            "DistributedOptimizer: sharding= needs a torch whose optimizers have hooks around load_state_dict(), not "
            f"{torch.__version__}"
        )
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            f"{kind.__name__}.step() evaluates its closure several times and looks at all gradients together: leave "
            "sharding out"
        )
    if any(callable(getattr(kind, name, None)) for name in ("train", "eval")):
        raise UnsupportedError(
            f"{kind.__name__} exchanges the values of parameters in train() and eval(), also of those that other ranks "
            "own: leave sharding out"
        )
    if not is_of_torch(optimizer):
        _refuse_unknown(optimizer)


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its class is of ``torch.optim``: in place it writes those parameters that have gradients, and no others,
    and keeps state nowhere else."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def steps_elements(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step of a part of a parameter gives that part the values that a step of the whole would."""
    return any(type(optimizer) is getattr(torch.optim, name) for name in _BY_ELEMENT)


def _refuse_unknown(optimizer: torch.optim.Optimizer) -> None:
    """Steps tiny parameters by other optimizers of its class: all together, and each half alone; then each half goes on
    in the optimizer of the other, as a parameter does that gets another owner.

    Raises:
        UnsupportedError: They cannot be made, or the halves come to other values.
    """
    name = type(optimizer).__name__
    try:
        whole, *halves = (_Trial(optimizer, chosen) for chosen in ((0, 1), (0,), (1,)))
        is_alone = _agree(whole, halves)
        for half, other in (halves, halves[::-1]):
            half.take(other)
        halves[0].chosen, halves[1].chosen = halves[1].chosen, halves[0].chosen
        keeps_state = _agree(whole, halves)
    except Exception as error:
        raise UnsupportedError(
            f"sharding= cannot try out whether {name} steps each parameter by itself, as {name}(parameters, "
            f"**defaults) and its step() raise {type(error).__name__}: {error}; leave sharding out"
        ) from error
    if not is_alone:
        raise UnsupportedError(
            f"sharding= needs an optimizer that steps each parameter by itself; {name} steps one by the gradients "
            "of others as well: leave sharding out"
        )
    if not keeps_state:
        raise UnsupportedError(
            f"sharding= needs an optimizer that has all state of a parameter in optimizer.state; {name} keeps some "
            "elsewhere, which is lost when another rank steps the parameter: leave sharding out"
        )


class _Trial:
    """An optimizer of tiny parameters, with the class and the options of another one.

    Args:
        model: The other one.
        chosen: The halves of the parameters, 0 or 1, that it steps; the others have no gradients.
    """

    def __init__(self, model: torch.optim.Optimizer, chosen: tuple[int, ...]) -> None:
        kind: Callable[..., torch.optim.Optimizer] = type(model)
        taken = inspect.signature(kind).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        self._numbers = torch.Generator().manual_seed(1)
        self.parameters: list[torch.nn.Parameter] = []
        groups = []
        for group in model.param_groups:
            options = {key: copy.deepcopy(value) for key, value in group.items() if key not in _NO_OPTIONS}
            if "lr" in options:  # a scheduler may begin at 0, where nothing moves
                options["lr"] = options.get("initial_lr", options["lr"]) or _PROBE_LR
            groups.append({"params": [torch.nn.Parameter(self._drawn(shape)) for shape in _PROBE_SHAPES], **options})
            self.parameters += groups[-1]["params"]
        used = groups[0] if len(groups) == 1 else copy.deepcopy(model.defaults)
        options = {key: used[key] for key in model.defaults if takes_any or key in taken}
        self.optimizer = kind(self.parameters if len(groups) == 1 else groups, **options)
        self.chosen = chosen

    def _drawn(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(tuple(shape), generator=self._numbers, dtype=torch.float32, device="cpu")

    def values(self) -> dict[int, torch.Tensor]:
        """The parameters that it steps, by their numbers."""
        return {number: value.detach() for number, value in enumerate(self.parameters) if number % 2 in self.chosen}

    def step(self) -> None:
        """Steps a few times."""
        for scale in _PROBE_SCALES:
            for number, parameter in enumerate(self.parameters):
                gradient = scale * (1 + self._drawn(parameter.shape))
                parameter.grad = gradient if number % 2 in self.chosen else None
            self.optimizer.step()

    def take(self, other: _Trial) -> None:
        """Gets the parameters that another one steps, and their state."""
        for number, value in other.values().items():
            self.parameters[number].data.copy_(value)
            if entries := other.optimizer.state.get(other.parameters[number]):
                self.optimizer.state[self.parameters[number]] = copy.deepcopy(entries)


def _agree(whole: _Trial, halves: Sequence[_Trial]) -> bool:
    """Whether each half comes to the values of the whole in some steps."""
    for trial in (whole, *halves):
        trial.step()
    values = whole.values()
    return all(torch.equal(values[number], value) for half in halves for number, value in half.values().items())
