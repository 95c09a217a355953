"""Gradients that are views of one storage, as those of parameters that the forward pass stacks or concatenates.

torch counts the changes of a storage, not of a view. So the result of one such gradient is written through a tensor
that has a count of its own: the count of the others still shows a change by the script only. Gradients that overlap in
memory would be averaged into each other; all but one of them move to memory of their own. Those that do not overlap
stay where they are, since a script may have put them into one buffer itself.
"""

from __future__ import annotations

import weakref

import torch

from horo.core.calls import is_shared, know_gradients
from horo.torch.compat.torch_private import owner_counter, run_number, storage_key

__all__ = [
    "COUNTS_IN_HOOKS",
    "NotedVersion",
    "current_run",
    "is_counted_twice",
    "note_version",
    "writable",
]

_count_owners = owner_counter()
current_run = run_number()
"""The number of the autograd run that calls; a run inside another has a higher number than that one."""

_release = tuple(int(number) for number in torch.__version__.split(".")[:2])
COUNTS_IN_HOOKS = _count_owners is not None and _release >= (2, 13)
"""Whether ``is_shared`` is exact in a hook on a parameter. An older torch still refers to a new gradient there."""


def is_counted_twice(grad: torch.Tensor) -> bool:
    """Whether a gradient is shared, in a hook of an older torch: one owner more is torch itself, if it is a new one."""
    is_new = grad._version == 0  # nothing was accumulated into it
    return grad.layout is torch.strided and _owners(grad) > _OWN + is_new


def _owners(grad: torch.Tensor) -> int:
    return 1 if _count_owners is None else _count_owners(storage_key(grad))


_OWN = 0 if _count_owners is None else _owners(torch.empty(1, device="cpu"))
"""The number for a tensor that is alone; torch's own object for the storage may count."""

know_gradients(torch.strided, _count_owners, _OWN, current_run)


def writable(grad: torch.Tensor) -> torch.Tensor:
    """The memory of a gradient, for a change that the other views of its storage do not count."""
    return grad.data if is_shared(grad) else grad


class NotedVersion:
    """The count of changes of a storage when autograd had accumulated into the last of several views of it."""

    __slots__ = ("__weakref__", "number")

    def __init__(self) -> None:
        self.number = 0

    def __eq__(self, version: object) -> bool:
        return self.number == version

    __hash__ = None  # type: ignore[assignment]  # it changes


_noted: weakref.WeakValueDictionary[int, NotedVersion] = weakref.WeakValueDictionary()
"""By storage. What is noted goes when no gradient is held with it any more."""


def note_version(grad: torch.Tensor) -> int | NotedVersion:
    """Notes how often a gradient was changed, after autograd has accumulated into it."""
    if not is_shared(grad):
        return grad._version
    storage = storage_key(grad)
    noted = _noted.get(storage)
    if noted is None:
        noted = _noted[storage] = NotedVersion()
    noted.number = grad._version
    return noted
