"""The thread that watches the processes of other ranks, one for all contexts of this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from horo.core.binding import ffi, lib
from horo.core.words import check, error_buffer

__all__ = ["Watch"]


class Watch:
    """The use of that thread by one context, until ``close``. The thread ends with the last use."""

    def begin(self, life_fds: Sequence[int]) -> Any:
        """The ``horo_watch`` for the setup of a context with these life lines; NULL if it has none.

        Raises:
            ResourceError: the thread cannot be started.
        """
        if max(life_fds, default=-1) < 0:
            return ffi.NULL
        with _process.lock:
            if not _process.users:
                out, error = ffi.new("horo_watch **"), error_buffer()
                check(lib.horo_create_watch(out, error, lib.HORO_MESSAGE_MAX), error)
                _process.native = out[0]
            _process.users.add(self)
            return _process.native

    def close(self) -> None:
        """No context may use it any more. Idempotent."""
        with _process.lock:
            if self in _process.users:
                _process.users.discard(self)
                if not _process.users:
                    native, _process.native = _process.native, ffi.NULL
                    lib.horo_destroy_watch(native)


class _Process:
    """The thread that the contexts of this process share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may end a context in the middle of another end
        self.users: set[Watch] = set()
        self.native: Any = ffi.NULL

    def after_fork(self) -> None:
        """In the child: the thread is the parent's; its descriptors are closed here."""
        lib.horo_destroy_watch(self.native)
        self.__init__()  # type: ignore[misc]


_process = _Process()
os.register_at_fork(after_in_child=_process.after_fork)
