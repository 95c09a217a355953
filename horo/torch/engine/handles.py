"""The handles of asynchronous operations, which ``poll`` and ``synchronize`` take."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, overload

import torch

from horo.errors import AbortedError, UsageError
from horo.torch.compat.profiler import profiling, span
from horo.torch.engine import runtime as _runtime

__all__ = ["Handle", "first_of", "poll", "synchronize"]

T = TypeVar("T")


class Handle(int, Generic[T]):
    """An asynchronous operation, as an integer like Horovod's, whose ``wait()`` returns a ``T``.

    As long as a variable has it, the name of the operation is taken, and its result is kept.

    Example:
        handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
        total = handle.wait()  # on 2 ranks [2., 2., 2.]
    """

    __slots__ = ()

    def wait(self) -> T:
        """As ``synchronize(handle)``."""
        return synchronize(self)

    def done(self) -> bool:
        """As ``poll(handle)``."""
        return poll(self)

    def __copy__(self) -> Handle[T]:
        return self  # another object would not hold the result

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle[T]:
        return self


def first_of(results: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The result of a request with one tensor, for ``Request.publish``."""
    return results[0]


def poll(handle: int) -> bool:
    """Whether an asynchronous operation is done, so that ``synchronize(handle)`` would return at once.

    Returns at once; never blocks. Once it has returned True, another operation may have the name of this one.

    Args:
        handle: Of an asynchronous operation.

    Raises:
        UsageError: The handle is unknown or was synchronized already.
        AbortedError: ``shutdown()`` came before it was synchronized.

    Example:
        handle = hvd.allreduce_async(torch.ones(3))
        print("done" if hvd.poll(handle) else "in progress")
    """
    request = _lookup(handle)
    done: bool = request.done()
    if done:
        request.free_name()
    return done


@overload
def synchronize(handle: Handle[T]) -> T: ...
@overload
def synchronize(handle: int) -> Any: ...
def synchronize(handle: int) -> Any:
    """Waits for an asynchronous operation and returns its result; the handle is gone afterwards, also if this raises.

    Blocks until the operation is done, that is until all ranks have begun it. An exception of a signal handler, such as
    Ctrl-C, ends the wait; the handle stays then, and another call returns the result. Threads that wait for one handle
    at once get the same result or error, but of a tensor on a GPU only one gets the result.

    Args:
        handle: Of an asynchronous operation.

    Returns:
        The tensor, or for the grouped forms the tuple of tensors.

    Raises:
        UsageError: The handle is unknown or was synchronized already. Or its result is on a GPU whose current stream
            is being captured into a CUDA graph; then the handle stays.
        MismatchError: Ranks submitted different things under one name.
        GroupError: A rank is lost or horo was shut down.

    Example:
        handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
        total = hvd.synchronize(handle)  # on 2 ranks [2., 2., 2.]
    """
    request = _lookup(handle)
    requests = _runtime.current().requests
    if not profiling._is_profiler_enabled:
        result = request.wait(keep=True)
    else:
        with span(f"horo.synchronize {request.label}"):
            result = request.wait(keep=True)
    # From here on nothing is called, so no signal handler runs: the result is lost no more.
    if handle in requests:
        del requests[handle]
    return result


def _lookup(handle: int) -> Any:
    """The ``Request`` of a handle, whose module is above this one."""
    runtime = _runtime.current()
    request = runtime.requests.get(handle)
    if request is not None and request.public:
        return request
    if isinstance(handle, int) and _runtime.FIRST_HANDLE_BASE < handle <= runtime.handle_base:
        raise AbortedError(f"Handle {handle} was created before horo was shut down.")
    raise UsageError(f"Handle {handle} was not created or has been cleared.")
