"""A notice to whoever asks at one of a few ports; that only the right ones can read or trust it is up to what it says.

Those who ask try all places at once and stay patient with each, since strangers may be at some and say nothing.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from horo._bootstrap.addresses import Endpoint, socket_address
from horo._errors import HoroError

__all__ = ["NoticeServer", "fetch"]

T = TypeVar("T")

_SEND_S = 5.0
_NOTICE_BYTES_MAX = 1 << 16
_RETRY_FIRST_S = 0.02
_RETRY_LAST_S = 0.5


class NoticeServer:
    """Sends a notice to whoever connects, one after the other, until ``close``.

    Args:
        listeners: the server's from now on.
        make: gives the notice for one reader; an error of horo means none, and is logged. Called on a thread.
    """

    def __init__(self, listeners: Sequence[socket.socket], make: Callable[[], bytes]) -> None:
        self._listeners = list(listeners)
        self._make = make
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        for waited in (self._wake_in, *self._listeners):
            self._selector.register(waited, selectors.EVENT_READ, waited)
        self._thread = threading.Thread(target=self._run, name="horo-notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening; idempotent."""
        self._wake_out.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data is self._wake_in:
                        return
                    self._serve(key.data)
        finally:
            self._selector.close()
            for waited in (self._wake_in, *self._listeners):
                waited.close()

    def _serve(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_SEND_S)
            try:
                connection.sendall(self._make())
            except HoroError as error:
                logging.getLogger("horo").warning("a rank that asked for the job's secret got none: %s", error)


@dataclass
class _Asked:
    """An address that was asked, and what it has answered so far."""

    endpoint: Endpoint
    connection: socket.socket
    heard: bytearray = field(default_factory=bytearray)


def fetch(
    endpoints: Sequence[Endpoint],
    timeout_s: float,
    read: Callable[[bytes], T | None],
    elsewhere: Callable[[], T | None],
) -> T | None:
    """Asks all endpoints at once, again and again, until one sends something usable; None if none did in time.

    Args:
        endpoints: where the credential may be had; strangers may be at some.
        timeout_s: how long to try.
        read: makes the result of what an endpoint sent; None: it is of no use.
        elsewhere: looked at between attempts; a result that is not None ends the search.
    """
    deadline, pause_s = time.monotonic() + timeout_s, _RETRY_FIRST_S
    idle = list(endpoints)
    with selectors.DefaultSelector() as selector:
        try:
            while time.monotonic() < deadline:
                found = elsewhere()
                if found is not None:
                    return found
                while idle:
                    _ask(idle.pop(), selector)
                round_end = min(time.monotonic() + pause_s, deadline)
                while (left_s := round_end - time.monotonic()) > 0:
                    for key, _ in selector.select(left_s):
                        asked: _Asked = key.data
                        if _hear(asked):
                            continue
                        selector.unregister(asked.connection)
                        asked.connection.close()
                        idle.append(asked.endpoint)
                        found = read(bytes(asked.heard)) if asked.heard else None
                        if found is not None:
                            return found
                pause_s = min(pause_s * 2, _RETRY_LAST_S)
        finally:
            for key in list(selector.get_map().values()):
                key.data.connection.close()
    return None


def _ask(endpoint: Endpoint, selector: selectors.BaseSelector) -> None:
    family, sockaddr = socket_address(*endpoint)
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    connection.connect_ex(sockaddr)  # its error comes back from recv
    selector.register(connection, selectors.EVENT_READ, _Asked(endpoint, connection))


def _hear(asked: _Asked) -> bool:
    """Takes what has come; whether more may come."""
    try:
        data = asked.connection.recv(_NOTICE_BYTES_MAX)
    except BlockingIOError:
        return True
    except OSError:
        asked.heard.clear()
        return False
    asked.heard += data
    return bool(data) and len(asked.heard) < _NOTICE_BYTES_MAX
