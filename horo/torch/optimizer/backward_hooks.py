"""The hook of each gradient, and the end of a backward pass, when all gradients that it makes are there.

Autograd numbers its runs and calls back at the end of each. A backward may run inside another one: a checkpoint with
``use_reentrant=True`` runs its part of the graph so. Only the outermost end counts, since parts that follow may add to
the same gradients.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from horo.core.calls import Ready
from horo.torch.compat import torch_private
from horo.torch.optimizer.membership import HOOK_LOCK, Newer
from horo.torch.optimizer.parameter_state import BUCKET_BYTES, ParameterState
from horo.torch.optimizer.shared_gradients import current_run
from horo.torch.optimizer.together import Reduces, reduce_together

__all__ = ["HoldsGradients", "ReadyGradients", "ReducesAtEnd", "call_at_end", "find_caller", "runs_elsewhere"]

_ENTRIES = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_FUNCTION_BACKWARD = torch_private.code_of_function_backward()


class HoldsGradients(Protocol):
    """A reducer whose hooks hold gradients until there is a bucket of them."""

    def gradient_ready(self, state: ParameterState) -> bool:
        """Called by a hook; whether that is to hold the gradient."""

    def submit_ready(self) -> None:
        """Called when a bucket is full."""


class ReadyGradients(Ready):
    """The gradients of a run of autograd that wait for more of them, to be submitted together.

    Hooks of parameters refer to it, so it refers to the reducer weakly.
    """

    __slots__ = ("_newer", "_reducer")

    def __init__(self, reducer: HoldsGradients, newer: Newer) -> None:
        super().__init__()
        self._reducer, self._newer = weakref.ref(reducer), newer
        self.states: list[ParameterState] = []
        self.clear()

    def clear(self) -> None:
        """Forgets them, and the run."""
        self.run = -1
        """Autograd's number of the run that called a hook last; -1 outside backward."""
        self.overlaps = False
        """Whether gradients are held here; else they travel when the run has ended."""
        self.room = BUCKET_BYTES
        self.states.clear()

    def take(self) -> list[ParameterState]:
        """Removes and returns them. Hooks of other threads may add some meanwhile."""
        self.room = BUCKET_BYTES
        taken = self.states[:]
        del self.states[: len(taken)]
        return taken

    def admit(self, state: ParameterState) -> bool:
        """Called by a hook that cannot simply hold its gradient; whether it is to."""
        target = self._reducer()
        return target is not None and not self._newer.any() and target.gradient_ready(state)

    def submit(self) -> None:
        """Called by the hook that fills a bucket."""
        if (target := self._reducer()) is not None:
            target.submit_ready()


class ReducesAtEnd(Reduces, Protocol):
    """A reducer whose gradients are due at the end of a backward."""

    def end_pass(self) -> bool:
        """Called at the end of the outermost backward; whether gradients are due."""


class _End:
    """The end of a run of autograd. The run alone refers to it, also where an exception ends that."""

    def __init__(self, thread: int | None) -> None:
        self.reducers: weakref.WeakSet[ReducesAtEnd] = weakref.WeakSet()
        """The reducers that the run concerns."""
        self.thread = thread
        """The thread that called the outermost ``backward()``; None: not known, or that has ended."""

    def run_ended(self) -> None:
        """Called by autograd."""
        try:
            node = torch_private.outer_node()
            if node is None or not _call_after(node, self.reducers, self.thread):
                due = sorted(self.reducers, key=lambda reducer: reducer.membership.order)
                reduce_together([reducer for reducer in due if reducer.end_pass()])
        finally:
            self.thread = None  # who keeps an error keeps this object, too


_ends: weakref.WeakValueDictionary[int, _End] = weakref.WeakValueDictionary()
"""By the number of the run, which no other run gets."""


def find_caller() -> tuple[bool, int | None]:
    """Finds who has called the run of autograd that calls. The walk up the stack costs a few microseconds.

    Returns:
        Whether the run is inside another one; and the thread that called the outermost ``backward()``, which is None
        in a thread of autograd's own: it has one for each GPU, and some for what is nested deeply.
    """
    calls, outermost = 0, None
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code in _ENTRIES or code is _FUNCTION_BACKWARD:
            calls, outermost = calls + 1, code
        frame = frame.f_back
    is_here = outermost in _ENTRIES
    return calls > is_here, threading.get_ident() if is_here else None


def runs_elsewhere(reducer: ReducesAtEnd, thread: int) -> bool:
    """Whether a thread other than ``thread`` is in a backward for gradients of ``reducer``."""
    ends = [reference() for reference in _ends.valuerefs()]  # at once: other threads end runs meanwhile
    return any(end is not None and end.thread not in {None, thread} and reducer in end.reducers for end in ends)


def call_at_end(reducer: ReducesAtEnd, thread: int | None) -> None:
    """Reduces the gradients of ``reducer`` at the end of the outermost backward in progress, which ``thread`` called.

    It is called in a hook of autograd. An exception of the end comes out of ``backward()``.
    """
    run = current_run()
    with HOOK_LOCK:
        end = _ends.get(run)
        if end is None:
            end = _ends[run] = _End(thread)
            torch_private.queue_at_end(end.run_ended)
        end.reducers.add(reducer)


def _call_after(node: Any, reducers: Iterable[ReducesAtEnd], thread: int | None) -> bool:
    """Calls ``call_at_end`` in the run that evaluates ``node``, right after it; whether anything comes after it."""
    handles: list[Any] = []

    def begin(*_: Any) -> None:
        while handles:
            handles.pop().remove()
        for reducer in reducers:
            call_at_end(reducer, thread)

    for following, _ in node.next_functions:
        if following is not None:
            handles.append(following.register_prehook(begin))
    return bool(handles)
