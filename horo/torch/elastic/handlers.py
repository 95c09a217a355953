"""The parts of a state that are more than picklable objects: models, optimizers, samplers, and others with a state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from horo.errors import UsageError
from horo.torch.elastic.sampler import ElasticSampler
from horo.torch.engine.operation import check_tensor
from horo.torch.functions.broadcast_state import describe_groups, describe_shape, put_together, take_apart
from horo.torch.functions.model_state import model_state

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "PartHandler",
    "SamplerStateHandler",
    "StateHandler",
    "get_handler_registry",
    "handler_of",
    "set_handler_registry",
]


class StateHandler:
    """Keeps one attribute of a ``TorchState``, in a way of its own: a subclass has all three methods.

    Args:
        value: The attribute.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keeps a copy of the value's state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Returns to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives all ranks the state of rank 0."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Called when the attribute gets another value; the whole state is saved after it."""
        self.value = value


class PartHandler(StateHandler):
    """A part that the state keeps and syncs with the others: in tensors, and objects that have their order in them."""

    def describe(self) -> list[str]:
        """Lines that are equal on all ranks whose parts fit together."""
        return []

    def capture(self, tensors: list[torch.Tensor]) -> Any:
        """The objects; ``tensors`` receives the tensors."""
        raise NotImplementedError

    def accept(self, objects: Any) -> list[torch.Tensor]:
        """Takes over the objects of a captured part.

        Returns:
            The tensors here that are to get the values of the captured ones, in their order.

        Raises:
            UsageError: They are of a part that does not fit.
        """
        raise NotImplementedError

    def parameters(self) -> Iterable[torch.Tensor]:
        """The tensors whose gradients a step that is broken off leaves behind."""
        return ()

    def forget(self) -> None:
        """Removes what else it leaves behind."""

    def reset(self) -> None:
        """Called when the ranks of the job have changed."""


class ModelStateHandler(PartHandler):
    """A module: parameters, buffers, extra states, and its modes: a step that is broken off may have changed them."""

    value: torch.nn.Module

    def describe(self) -> list[str]:
        """As in the base class."""
        return [f"{name!r} {describe_shape(tensor)}" for name, tensor in model_state(self.value).tensors]

    def capture(self, tensors: list[torch.Tensor]) -> Any:
        """As in the base class."""
        state = model_state(self.value, detached=False)
        for name, tensor in state.tensors:
            check_tensor(tensor, "the state's model", name)
            tensors.append(tensor)
        parts = list(self.value.modules())
        trained = [part.training for part in parts]
        return [name for name, _ in state.tensors], state.objects, trained, [each.requires_grad for each in _own(parts)]

    def accept(self, objects: Any) -> list[torch.Tensor]:
        """As in the base class."""
        names, extra, trained, free = objects
        state = model_state(self.value)
        if names != [name for name, _ in state.tensors]:
            raise UsageError("the model has other parameters than the one whose state comes from a commit")
        state.replace(extra)
        parts = list(self.value.modules())
        for part, is_trained in zip(parts, trained, strict=False):
            part.training = is_trained
        for parameter, is_free in zip(_own(parts), free, strict=False):
            if parameter.requires_grad != is_free:
                parameter.requires_grad_(is_free)
        return [tensor for _, tensor in state.tensors]

    def parameters(self) -> Iterable[torch.Tensor]:
        """As in the base class."""
        return self.value.parameters()


def _own(parts: list[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """The parameters of modules; one that several have comes several times."""
    return [each for part in parts for each in part._parameters.values() if each is not None]


class _Steps:
    """Counts the steps of an optimizer. The optimizer has its method, and so no handler outlives its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.done = 0
        optimizer.register_step_post_hook(self._add)

    def _add(self, *_: object) -> None:
        self.done += 1


class OptimizerStateHandler(PartHandler):
    """An optimizer: options and state.

    Attributes:
        steps: Those that it has finished since the last commit.
    """

    value: torch.optim.Optimizer

    def __init__(self, value: torch.optim.Optimizer) -> None:
        super().__init__(value)
        self.steps = _Steps(value)

    def set_value(self, value: torch.optim.Optimizer) -> None:
        """As in the base class."""
        super().set_value(value)
        self.steps = _Steps(value)

    def describe(self) -> list[str]:
        """As in the base class."""
        return describe_groups(self.value)

    def capture(self, tensors: list[torch.Tensor]) -> Any:
        """As in the base class."""
        own: list[torch.Tensor] = []
        captured = describe_groups(self.value), take_apart(self.value, own, "the state's optimizer")
        tensors += own
        return captured

    def accept(self, objects: Any) -> list[torch.Tensor]:
        """As in the base class."""
        described, structure = objects
        if described != describe_groups(self.value):
            raise UsageError("the optimizer has other parameters than the one whose state comes from a commit")
        tensors: list[torch.Tensor] = []
        put_together(self.value, structure, tensors)
        return tensors

    def parameters(self) -> Iterable[torch.Tensor]:
        """As in the base class."""
        return (parameter for group in self.value.param_groups for parameter in group["params"])


class StatefulHandler(PartHandler):
    """Anything else with ``state_dict`` and ``load_state_dict``: a scheduler, a gradient scaler."""

    def capture(self, tensors: list[torch.Tensor]) -> Any:
        """As in the base class."""
        return self.value.state_dict()

    def accept(self, objects: Any) -> list[torch.Tensor]:
        """As in the base class."""
        self.value.load_state_dict(objects)
        return []

    def forget(self) -> None:
        """As in the base class: a gradient scaler has noted which optimizers it has unscaled in this step."""
        noted = getattr(self.value, "_per_optimizer_states", None)
        if isinstance(noted, dict):
            noted.clear()


class SamplerStateHandler(StatefulHandler):
    """A sampler, which shares out its samples anew."""

    def reset(self) -> None:
        """As in the base class."""
        self.value.reset()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """The handlers of states that are made from now on, each behind the type of its values; the first that fits."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replaces all of them."""
    _registry[:] = list(registry)


def handler_of(value: Any) -> StateHandler | None:
    """A handler for an attribute; None: it is kept as a picklable object."""
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return StatefulHandler(value)
    return None
