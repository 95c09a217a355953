"""A thread that waits for sockets and calls their functions."""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

__all__ = ["SelectorThread"]


class SelectorThread:
    """Calls the functions of ready sockets on a thread of its own, until ``close``.

    The ``data`` of every key of ``selector`` is a function without arguments. Keys are changed before ``start``, or on
    the thread.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self.selector = selectors.DefaultSelector()
        self.stopping = False
        self._wake_in, self._wake_out = socket.socketpair()
        self.selector.register(self._wake_in, selectors.EVENT_READ, self._stop)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(
        self,
        *,
        on_end: Callable[[], None],
        on_turn: Callable[[float], None] = lambda now: None,
        timeout_s: Callable[[float], float | None] = lambda now: None,
    ) -> None:
        """Starts the thread, which calls all three.

        Args:
            on_end: called once, at the end; closes the registered sockets.
            on_turn: called after each turn with the time.
            timeout_s: called with the time; returns the longest wait in seconds. None: until a socket is ready.
        """
        self._on_end, self._on_turn, self._timeout_s = on_end, on_turn, timeout_s
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and waits for its end; idempotent. Does nothing in a forked child, which has no thread."""
        if os.getpid() == self._pid:
            self._wake_out.close()
            self._thread.join()

    def _stop(self) -> None:
        self.stopping = True

    def _run(self) -> None:
        try:
            while not self.stopping:
                for key, _ in self.selector.select(self._timeout_s(time.monotonic())):
                    key.data()
                self._on_turn(time.monotonic())
        finally:
            self._on_end()
            self._wake_in.close()
            self.selector.close()
