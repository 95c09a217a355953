"""Gradients that are views of one storage, as those of parameters that the forward pass stacks or concatenates.

torch counts the changes of a storage, not of a view. So the result of one such gradient is written through a tensor
that has a count of its own: the count of the others still shows a change by the script only. Gradients that overlap in
memory would be averaged into each other; all but one of them move to memory of their own. Those that do not overlap
stay where they are, since a script may have put them into one buffer itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from horo.torch._gradients import ParameterState

__all__ = [
    "COUNTS_IN_HOOKS",
    "NotedVersion",
    "is_counted_twice",
    "is_shared",
    "note_version",
    "separate_overlapping",
    "was_noted",
    "writable",
]

_count_owners: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)

_release = tuple(int(number) for number in torch.__version__.split(".")[:2])
COUNTS_IN_HOOKS = _count_owners is not None and _release >= (2, 13)
"""Whether ``is_shared`` is exact in a hook on a parameter. An older torch still refers to a new gradient there."""


def is_shared(grad: torch.Tensor) -> bool:
    """Whether another tensor may have the memory of a gradient. A sparse one has no storage."""
    return grad.layout is torch.strided and _owners(grad) > _OWN


def is_counted_twice(grad: torch.Tensor) -> bool:
    """Whether a gradient is shared, in a hook of an older torch: one owner more is torch itself, if it is a new one."""
    is_new = grad._version == 0  # nothing was accumulated into it
    return grad.layout is torch.strided and _owners(grad) > _OWN + is_new


def _owners(tensor: torch.Tensor) -> int:
    return _OWN + 1 if _count_owners is None else _count_owners(tensor.untyped_storage()._cdata)


_OWN = 0
_OWN = _owners(torch.empty(1, device="cpu"))
"""The number for a tensor that is alone; torch's own object for the storage may count."""


def writable(grad: torch.Tensor) -> torch.Tensor:
    """The memory of a gradient, for a change that the other views of its storage do not count."""
    return grad.data if is_shared(grad) else grad


class NotedVersion:
    """The count of changes of a storage when autograd had accumulated into the last of several views of it."""

    __slots__ = ("__weakref__", "number")

    def __init__(self) -> None:
        self.number = 0


_noted: weakref.WeakValueDictionary[int, NotedVersion] = weakref.WeakValueDictionary()
"""By storage. What is noted goes when no gradient is held with it any more."""


def note_version(grad: torch.Tensor) -> int | NotedVersion:
    """Notes how often a gradient was changed, after autograd has accumulated into it."""
    if not is_shared(grad):
        return grad._version
    storage = grad.untyped_storage()._cdata
    noted = _noted.get(storage)
    if noted is None:
        noted = _noted[storage] = NotedVersion()
    noted.number = grad._version
    return noted


def was_noted(noted: int | NotedVersion, version: int) -> bool:
    """Whether the count that was noted is ``version``."""
    return (noted.number if isinstance(noted, NotedVersion) else noted) == version


def separate_overlapping(states: Iterable[ParameterState]) -> None:
    """Gives gradients that overlap memory of their own. Autograd is off.

    A gradient with gaps between its elements stays where it is: torch makes none.
    """
    by_parameter: dict[Any, list[ParameterState]] = {}
    for state in states:
        grad = state.parameter.grad
        if grad is not None and is_shared(grad) and _is_dense(grad):
            by_parameter.setdefault(state.parameter, []).append(state)
    end = 0
    for parameter in sorted(by_parameter, key=lambda item: int(item.grad.data_ptr())):
        grad = parameter.grad
        if grad.data_ptr() < end:
            parameter.grad = grad.clone()
            _hold_again(by_parameter[parameter], grad, parameter.grad)
        else:
            end = grad.data_ptr() + grad.numel() * grad.element_size()


def _hold_again(states: Iterable[ParameterState], before: torch.Tensor, grad: torch.Tensor) -> None:
    """Lets the copy be held instead of a gradient, unless that was changed."""
    for state in states:
        if state.held is not None and state.held[0] is before and was_noted(state.held[1], before._version):
            state.held = grad, grad._version


def _is_dense(grad: torch.Tensor) -> bool:
    reach = 1 + sum((extent - 1) * stride for extent, stride in zip(grad.shape, grad.stride(), strict=True))
    return reach == grad.numel()
