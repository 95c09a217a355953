"""One request to the core, from its submission until its result is taken."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from horo.core import context
from horo.errors import AbortedError, HoroError, UsageError
from horo.torch.engine import runtime as _runtime
from horo.torch.engine.devices import refuse_capture
from horo.torch.engine.handles import Handle
from horo.torch.engine.operation import StagedTensors

__all__ = ["Request", "left_request", "wait_any"]

T = TypeVar("T")


class Request:
    """One operation in progress. ``wait`` must be called once; it returns the result."""

    __slots__ = (
        "_error",
        "_failed",
        "_finish",
        "_handle",
        "_memory",
        "_runtime",
        "_taken_name",
        "_was_begun",
        "label",
        "number",
        "public",
    )

    def __init__(  # noqa: PLR0917  (keywords take time here)
        self,
        runtime: _runtime.Runtime,
        handle: int,
        label: str,
        memory: Any,
        finish: Callable[[context.Context, int, Any], Any],
        taken_name: str | None,
    ) -> None:
        """``taken_name``: that of ``CachedRequest``."""
        self._runtime = runtime
        self._taken_name = taken_name
        self._handle = handle
        self._memory = memory  # the core's until the request is done
        self._finish = finish
        self._was_begun = False  # a call of wait()
        self._error: HoroError | None = None
        self._failed: tuple[type[HoroError], str] | None = None  # the same for good, for other threads that wait
        self.label = label
        number = runtime.handle_base + handle
        self.number: int = number
        """The number of the request, unique over all jobs of the process; from ``publish`` on the ``Handle``."""
        self.public = False
        """Whether ``synchronize`` may find it."""
        runtime.requests[number] = self

    def publish(self, shape: Callable[[Any], T] | None = None) -> Handle[T]:
        """Lets ``synchronize`` find it; ``wait`` then returns the result of ``shape``.

        A name is taken from here until ``wait`` returns, ``free_name`` is called or the handle is garbage, whether the
        operation is done or not. So a second use of a name is refused always, not only if it is quick.

        Returns:
            Its public handle.
        """
        handle: Handle[T] = Handle(self.number)
        self.number = handle  # from here on it is held
        if shape is not None:
            finish = self._finish
            self._finish = lambda core, number, memory: shape(finish(core, number, memory))
        self.public = True
        runtime = self._runtime
        if self._taken_name is not None:
            runtime.taken_names[self._taken_name] = self
        if len(runtime.requests) >= runtime.requests_checked_at:
            _drop_unheld(runtime)
        return handle

    def free_name(self) -> None:
        """Lets another operation have its name, once this one is done."""
        taken = self._runtime.taken_names
        if self._taken_name is not None and taken.get(self._taken_name) is self:
            taken.pop(self._taken_name, None)

    def check_name(self) -> None:
        """Refuses another call of its name, unless nobody can ask for this one any longer.

        Raises:
            UsageError: Somebody can. Other ranks are not told: nobody knows which of their calls it is.
        """
        if self.is_held():
            self._runtime.core.duplicate = self.label
            raise UsageError(
                f"'{self.label}': a tensor of this name is being processed already; call synchronize() with its handle "
                "first, or use another name"
            )
        self.free_name()

    def is_held(self) -> bool:
        """Whether somebody else has the very object ``number``, so that ``synchronize`` may still come.

        A finalizer could note its end, but a signal handler may raise in there, and Python drops such an exception.
        """
        return _count_references(self) > _OWN_REFERENCES

    def done(self) -> bool:
        """Whether ``wait`` would return at once; never blocks."""
        runtime, call = self._runtime, object()
        try:
            runtime.active_calls[call] = None
            if runtime.ended:
                runtime.raise_ended(self.label)
            return runtime.core.poll(self._handle)
        except UsageError:
            if runtime.ended or not self._was_begun:
                raise
            return True  # a call of wait() has come so far, and was interrupted
        finally:
            runtime.active_calls.pop(call, None)

    def is_done(self) -> bool:
        """Whether the operation is done or has failed; never blocks or raises."""
        return not self._runtime.core.in_progress(self._handle)

    def wait(self, *, keep: bool = False) -> Any:
        """Blocks until the operation is done and returns its result.

        A KeyboardInterrupt (or another exception from a signal handler) leaves the request: its memory and its result
        are kept, and ``wait`` may be called again. If several threads wait at once, each gets the result or the
        error, but of tensors on a GPU only one gets the result.

        Args:
            keep: After a success the request stays in the list of requests, for the caller to take it out. Before
                Python 3.11 a signal handler may run between the end of a function and what its caller does next.

        Raises:
            HoroError: The error of the operation.
            UsageError: The results go to a GPU whose current stream is being captured; the request stays.
        """
        runtime, call = self._runtime, object()
        result = failure = None
        if isinstance(self._memory, StagedTensors) and self._memory.device is not None:
            refuse_capture(self.label)
        try:
            runtime.active_calls[call] = None
            if runtime.ended:
                runtime.raise_ended(self.label)
            if self._error is None:
                has_ended_well = self._was_begun and self.is_released() and self._failed is None
                handle = 0 if has_ended_well else self._handle
                self._was_begun = True
                result = self._finish(runtime.core, handle, self._memory)
            else:
                failure = self._error
                runtime.core.release_if_done(self._handle)
        except HoroError as error:
            if runtime.ended or self._outlasts(error):
                raise
            result, failure = self._end_by(error)
        finally:
            runtime.active_calls.pop(call, None)
        if self._taken_name is not None:
            self.free_name()
        # From here on nothing is called, so no signal handler runs: the result is lost no more.
        if keep and failure is None:
            return result
        self._error, self._was_begun = None, False
        if self.number in runtime.requests:
            del runtime.requests[self.number]
        if failure is None:
            return result
        try:
            raise failure
        finally:
            del failure  # which refers to this frame

    def _end_by(self, error: HoroError) -> tuple[Any, HoroError | None]:
        """The result and the error after ``error``, or those of another thread that has released the handle before."""
        core, memory = self._runtime.core, self._memory
        if not error._is_released:
            self._error = error
            self._failed = type(error), str(error)
            core.release_if_done(self._handle)
        elif self._failed is not None:
            error = self._failed[0](self._failed[1])
        elif not isinstance(memory, StagedTensors) or memory.device is None:  # else that thread's stream waits for it
            return self._finish(core, 0, memory), None
        return None, error

    def _outlasts(self, error: HoroError) -> bool:
        """Whether an error is not the request's: of a signal handler, or since its GPU's stream is being captured."""
        core = self._runtime.core  # torch was asked of the current GPU's stream only
        return core.in_progress(self._handle) or (isinstance(error, UsageError) and core.succeeded(self._handle))

    def failure(self) -> HoroError | None:
        """Blocks until the operation is done or has failed; its error, if it has. ``wait`` is still to be called.

        Unlike ``wait`` it may be called again, so that an exception of a signal handler loses nothing.
        """
        try:
            return self._runtime.inside(self.label, self._failure)
        except HoroError as error:
            if not self._runtime.ended:  # a signal handler's
                raise
            return error

    def is_released(self) -> bool:
        """Whether ``wait`` has taken the result of an operation that has not failed, even if it did not return."""
        try:
            self._runtime.inside(self.label, lambda: self._runtime.core.poll(self._handle))
        except (UsageError, AbortedError):
            return True
        return False

    def wait_done(self) -> None:
        """Blocks until the operation is done or has failed; ``wait`` then returns at once, or raises the error."""
        self._runtime.inside(self.label, self._failure)

    def _failure(self) -> HoroError | None:
        core = self._runtime.core
        try:
            core.wait(self._handle)
        except HoroError as error:
            if core.in_progress(self._handle):  # a signal handler's
                raise
            return error
        return None


def _drop_unheld(runtime: _runtime.Runtime) -> None:
    """Drops what is done and whose public handle nobody has any longer, with its tensors and its result."""
    call = object()
    try:
        runtime.active_calls[call] = None
        if runtime.ended:
            return
        for request in list(runtime.requests.values()):
            on_gpu = isinstance(request._memory, StagedTensors) and request._memory.device is not None
            may_go = request.public and not request._was_begun and not on_gpu
            if may_go and not request.is_held() and request.is_done():
                request.free_name()
                runtime.core.release_if_done(request._handle)
                runtime.requests.pop(request.number, None)
        runtime.requests_checked_at = max(_runtime.REQUESTS_CHECKED_AT, 2 * len(runtime.requests))
    finally:
        runtime.active_calls.pop(call, None)


def _count_references(request: Request) -> int:
    return sys.getrefcount(request.number)


def _count_own_references() -> int:
    """The result of ``_count_references`` where only the request refers to its handle."""
    request = Request.__new__(Request)
    request.number = Handle(_runtime.FIRST_HANDLE_BASE + 1)
    return _count_references(request)


_OWN_REFERENCES = _count_own_references()


def left_request(tensor: Any, finish: Callable[[context.Context, int, Any], Any]) -> Request | None:
    """The request of ``tensor`` whose submission an exception of a signal handler has ended, if it was submitted.

    Args:
        tensor: One of the tensors of ``StagedTensors``.
        finish: As for ``Request``.
    """
    runtime = _runtime.current()
    request: Request
    for request in list(runtime.requests.values()):
        if _is_memory_of(request._memory, tensor):
            return request
    for handle, memory in list(runtime.abandoned.items()):
        if _is_memory_of(memory, tensor):
            left = Request(runtime, handle, "allreduce", memory, finish, None)
            runtime.abandoned.pop(handle, None)
            return left
    return None


def _is_memory_of(memory: Any, tensor: Any) -> bool:
    return any(each is tensor for each in getattr(memory, "tensors", ()))


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
