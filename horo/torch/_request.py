"""One request to the core, from its submission until its result is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from horo import _core
from horo.errors import HoroError
from horo.torch import _runtime

__all__ = ["Request", "wait_any"]


class _NamedHandle(int):
    """The public number of a request that has a name. The name is free when the number is garbage."""

    def __del__(self) -> None:
        runtime = _runtime.find()
        request = runtime and runtime.requests.get(self)
        if request:
            request.free_name()

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # a copy has no say about the name


class Request:
    """One operation in progress. ``wait`` must be called once; it returns the result."""

    __slots__ = ("_finish", "_handle", "_memory", "_runtime", "_taken_name", "label", "number", "public")

    def __init__(
        self,
        runtime: _runtime.Runtime,
        handle: int,
        label: str,
        memory: Any,
        finish: Callable[[_core.Context, int, Any], Any],
        *,
        taken_name: tuple[int, str] | None,
    ) -> None:
        """``taken_name``: what ``CachedRequest.taken_name`` says."""
        self._runtime = runtime
        self._taken_name = taken_name
        self._handle = handle
        self._memory = memory  # the core's until the request is done
        self._finish = finish
        self.label = label
        self.number = number = runtime.handle_base + handle
        """The public number of the request; unique over all jobs of the process."""
        self.public = False
        """Whether ``synchronize`` may find it."""
        runtime.requests[number] = self

    def publish(self, shape: Callable[[Any], Any] | None = None) -> int:
        """Lets ``synchronize`` find it; ``shape`` makes of its result what ``wait`` returns then.

        A name is taken from here until ``wait`` returns, ``free_name`` is called or the handle is garbage, whether the
        operation is done or not. So a second use of a name is refused always, not only if it is quick.

        Returns:
            Its public handle.
        """
        if shape is not None:
            finish = self._finish
            self._finish = lambda core, handle, memory: shape(finish(core, handle, memory))
        self.public = True
        if self._taken_name is None:
            return self.number
        self._runtime.taken_names[self._taken_name] = self.number
        return _NamedHandle(self.number)

    def free_name(self) -> None:
        """Lets another operation have its name, once this one is done."""
        taken = self._runtime.taken_names
        if self._taken_name is not None and taken.get(self._taken_name) == self.number:
            taken.pop(self._taken_name, None)

    def done(self) -> bool:
        """Whether ``wait`` would return at once; never blocks."""
        runtime, call = self._runtime, object()
        try:
            runtime.active_calls[call] = None
            if runtime.ended:
                runtime.raise_ended(self.label)
            return runtime.core.poll(self._handle)
        finally:
            runtime.active_calls.pop(call, None)

    def is_done(self) -> bool:
        """Whether the operation is done or has failed; never blocks or raises."""
        return not self._runtime.core.in_progress(self._handle)

    def wait(self) -> Any:
        """Blocks until the operation is done and returns its result.

        A KeyboardInterrupt (or another exception from a signal handler) leaves the request in progress: its memory is
        kept, and ``wait`` may be called again.

        Raises:
            HoroError: The error of the operation.
        """
        runtime, call = self._runtime, object()
        try:
            runtime.active_calls[call] = None
            if runtime.ended:
                runtime.raise_ended(self.label)
            try:
                result = self._finish(runtime.core, self._handle, self._memory)
            except HoroError:
                if not runtime.core.in_progress(self._handle):  # else it is a signal handler's
                    self._forget()
                raise
        finally:
            runtime.active_calls.pop(call, None)
        self._forget()
        return result

    def _forget(self) -> None:
        if self._taken_name is not None:
            self.free_name()
        self._runtime.requests.pop(self.number, None)

    def wait_done(self) -> None:
        """Blocks until the operation is done or has failed; ``wait`` then returns at once."""
        runtime, call = self._runtime, object()
        try:
            runtime.active_calls[call] = None
            if runtime.ended:
                runtime.raise_ended(self.label)
            try:
                runtime.core.wait(self._handle)
            except HoroError:
                if runtime.core.in_progress(self._handle):  # a signal handler's
                    raise
                return  # wait() raises it
        finally:
            runtime.active_calls.pop(call, None)


def wait_any(requests: Sequence[Request]) -> None:
    """Blocks until one of several requests is done or has failed; all are of one job.

    Raises:
        AbortedError: The job has ended.
    """
    first, call = requests[0], object()
    runtime = first._runtime
    try:
        runtime.active_calls[call] = None
        if runtime.ended:
            runtime.raise_ended(first.label)
        runtime.core.wait_any([request._handle for request in requests])
    finally:
        runtime.active_calls.pop(call, None)
