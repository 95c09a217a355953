"""Several requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from horo.core.binding import ffi, lib
from horo.core.request_buffer import RequestBuffer
from horo.errors import HoroError

__all__ = ["Buckets"]

_OK = lib.HORO_OK
_NULL, _submit, _finish = ffi.NULL, lib.horo_submit, lib.horo_finish  # looked up once, not per request
_SIGNAL_CHECK_MS = 100


def new_handles(count: int) -> Any:
    """Memory for so many handles, each 0 until there is one."""
    return ffi.new("int64_t[]", count)


class Buckets:
    """The part of a context that submits and finishes several requests at once."""

    _context: Any
    _place: Any

    if TYPE_CHECKING:

        def _submit_again(self, buffer: RequestBuffer) -> None: ...
        def finish(self, handle: int) -> None: ...
        def in_progress(self, handle: int) -> bool: ...

    @property
    def place(self) -> int:
        """The place of the address of the native context; NULL is there once it is destroyed."""
        return int(ffi.cast("uintptr_t", self._place))

    def submit_each(self, buffers: Sequence[RequestBuffer], handles: Any) -> None:
        """Submits requests in their order; never blocks.

        Args:
            buffers: as for ``submit``.
            handles: of ``new_handles``. Each handle is there before a signal handler can run.

        Raises:
            UsageError, ResourceError, GroupError: as ``submit``, of the first that is refused; no later one is
                submitted.
        """
        for index, buffer in enumerate(buffers):
            if _submit(self._context, buffer.request, handles + index, _NULL, 0) != _OK:
                buffer.last_handle[0] = 0
                try:
                    self._submit_again(buffer)
                finally:
                    handles[index] = buffer.last_handle[0]

    def finish_each(self, handles: Sequence[int]) -> dict[int, HoroError]:
        """``finish`` of all; the errors of those that have failed, by their place.

        Raises:
            BaseException: the exception of a signal handler, as from ``finish``.
        """
        errors = {}
        for index, handle in enumerate(handles):
            if _finish(self._context, handle, _SIGNAL_CHECK_MS, _NULL, 0) != _OK:
                try:
                    self.finish(handle)
                except HoroError as error:
                    if self.in_progress(handle):  # a signal handler's
                        raise
                    errors[index] = error
        return errors
