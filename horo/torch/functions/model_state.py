"""The argument of ``broadcast_parameters``, as tensors and as objects."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch

from horo.errors import UsageError
from horo.torch.functions.pickling import pickled

__all__ = ["ModelState", "model_state"]

_EXTRA_STATE = "_extra_state"
"""The name in a ``state_dict``, behind that of a module, of the result of its ``get_extra_state``."""


class ModelState(NamedTuple):
    """The state of a model, or a part of it."""

    tensors: list[tuple[str, torch.Tensor]]
    objects: dict[str, Any]
    """Extra states of modules, by name."""
    replace: Callable[[Mapping[str, Any]], None]
    """Takes the root's objects instead of these."""


def model_state(params: Any, *, detached: bool = True) -> ModelState:
    """The tensors and objects in the argument of ``broadcast_parameters``.

    The tensors of a module are detached, or else its parameters and buffers themselves, which takes half the time.

    Raises:
        UsageError: It is something else, or has an entry that is neither a tensor nor an extra state.
    """
    if isinstance(params, torch.nn.Module):
        return _of_module(params, detached)
    objects: dict[str, Any] = {}
    if isinstance(params, Mapping):
        entries: list[Any] = sorted(params.items(), key=lambda item: str(item[0]))
        if isinstance(params, MutableMapping):
            objects = {name: value for name, value in entries if _is_object(name, value)}
            entries = [entry for entry in entries if entry[0] not in objects]
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor)):
        entries = list(params)
    else:
        raise UsageError(
            "broadcast_parameters: expected a model, its state_dict() or named_parameters(), or a list, not "
            f"{type(params).__name__}"
        )
    return ModelState(_named_tensors(entries), objects, lambda found: _replace_in(params, found))


def _of_module(module: torch.nn.Module, detached: bool) -> ModelState:
    owners = {
        name: part
        for name, part in module.named_modules()
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state
    }

    def replace(found: Mapping[str, Any]) -> None:
        for name, state in found.items():
            owners[name].set_extra_state(state)

    entries = [entry for entry in sorted(module.state_dict(keep_vars=not detached).items()) if not _is_extra(entry[0])]
    objects = {name: part.get_extra_state() for name, part in owners.items()}
    return ModelState(_named_tensors(entries), objects, replace)


def _is_extra(name: Any) -> bool:
    return isinstance(name, str) and name.rpartition(".")[2] == _EXTRA_STATE


def _is_object(name: Any, value: Any) -> bool:
    return _is_extra(name) and not isinstance(value, torch.Tensor)


def _replace_in(state: MutableMapping[str, Any], found: Mapping[str, Any]) -> None:
    """No module can be found from its ``state_dict``; where it has another object, this is said."""
    for name, value in found.items():
        if not _are_equal(state[name], value):
            warnings.warn(
                f"broadcast_parameters: {name!r} was another object than the root's: the dict has the root's now, its "
                "model does not; pass the model itself, or call its load_state_dict()",
                stacklevel=4,
            )
        state[name] = value


def _are_equal(one: Any, other: Any) -> bool:
    try:
        return pickled(one) == pickled(other)
    except Exception:  # whatever a user's __reduce__ raises
        return False


def _named_tensors(entries: Iterable[Any]) -> list[tuple[str, torch.Tensor]]:
    named = []
    for index, entry in enumerate(entries):
        pair = isinstance(entry, tuple) and len(entry) == 2
        name, value = entry if pair else (str(index), entry)
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"broadcast_parameters: {name!r} is no tensor but {type(value).__name__}; use broadcast_object for it"
            )
        named.append((str(name), value))
    return named
