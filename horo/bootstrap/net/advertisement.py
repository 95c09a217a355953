"""An advertisement: bytes that a server sends to every client that connects to one of a few ports.

The server authenticates no client: the advertisement must be encrypted or signed if that matters. The clients connect
to all ports at once and keep waiting on each, since another program may listen at some of them and send nothing.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from horo.bootstrap.net.addresses import Endpoint, socket_address
from horo.bootstrap.net.listener import RefusalLog
from horo.bootstrap.net.selector_thread import SelectorThread
from horo.errors import HoroError

__all__ = ["AdvertisementServer", "Stock", "fetch"]

T = TypeVar("T")

_SEND_TIMEOUT_S = 5.0
_BYTES_MAX = 1 << 16
_RETRY_FIRST_S = 0.02
_RETRY_LAST_S = 0.5
FRESH_PER_S = 50.0
"""Most advertisements that are made per second once a stock is used up."""


class AdvertisementServer:
    """Sends an advertisement to each client that connects, one after the other, until ``close``.

    Args:
        listeners: listening sockets, which the server closes.
        make: returns the advertisement for one client. If it raises an error of horo, nothing is sent and the error is
            logged, as ``RefusalLog`` does it. Called on a thread.
    """

    def __init__(self, listeners: Sequence[socket.socket], make: Callable[[], bytes]) -> None:
        self._listeners = list(listeners)
        self._make = make
        self._log = RefusalLog(logging.getLogger("horo").warning)
        self._thread = SelectorThread("horo-advertisement")
        for listener in self._listeners:
            self._thread.selector.register(listener, selectors.EVENT_READ, partial(self._serve, listener))
        self._thread.start(on_end=self._close_listeners)

    def close(self) -> None:
        """Stops listening; idempotent."""
        self._thread.close()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _serve(self, listener: socket.socket) -> None:
        try:
            connection, sockaddr = listener.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_SEND_TIMEOUT_S)
            try:
                connection.sendall(self._make())
            except HoroError as error:
                reason = f"the job's secret cannot be given away: {error}"
                self._log.refuse(str(sockaddr[0]), reason, time.monotonic())


class Stock:
    """Makes advertisements that are valid for one client each, on demand and at a bounded rate.

    Once ``count`` are used up, clients that connect between two new ones get the same advertisement; a client that
    cannot use it connects again. So many connections cost little, and each rank gets a fresh advertisement soon.

    Args:
        make: returns a new advertisement, or raises an error of horo.
        count: most advertisements that are made at once.
        clock: returns seconds.
    """

    def __init__(self, make: Callable[[], bytes], count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._make, self._count, self._clock = make, count, clock
        self._left, self._since = float(count), clock()
        self._last = b""

    def take(self) -> bytes:
        """The advertisement for one client; empty if none could be made and it is too early to try again."""
        now = self._clock()
        self._left = min(self._left + (now - self._since) * FRESH_PER_S, self._count)
        self._since = now
        if self._left >= 1:
            self._left -= 1
            self._last = b""
            self._last = self._make()
        return self._last


@dataclass
class _Query:
    """A connection to one endpoint, and the bytes received so far."""

    endpoint: Endpoint
    connection: socket.socket
    received: bytearray = field(default_factory=bytearray)


def fetch(
    endpoints: Sequence[Endpoint],
    timeout_s: float,
    read: Callable[[bytes], T | None],
    elsewhere: Callable[[], T | None],
) -> T | None:
    """Connects to all endpoints at once, again and again, until one sends a usable advertisement.

    Args:
        endpoints: endpoints of the server; another program may listen at some of them.
        timeout_s: how long to try.
        read: makes the result from the bytes of one endpoint; None: they are not usable.
        elsewhere: called between attempts; a result that is not None ends the search.

    Returns:
        The result of ``read`` or ``elsewhere``; None if neither gave one in time.
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
                    _start(idle.pop(), selector)
                round_end = min(time.monotonic() + pause_s, deadline)
                while (left_s := round_end - time.monotonic()) > 0:
                    for key, _ in selector.select(left_s):
                        query: _Query = key.data
                        if _receive(query):
                            continue
                        selector.unregister(query.connection)
                        query.connection.close()
                        idle.append(query.endpoint)
                        found = read(bytes(query.received)) if query.received else None
                        if found is not None:
                            return found
                pause_s = min(pause_s * 2, _RETRY_LAST_S)
        finally:
            for key in list(selector.get_map().values()):
                key.data.connection.close()
    return None


def _start(endpoint: Endpoint, selector: selectors.BaseSelector) -> None:
    family, sockaddr = socket_address(*endpoint)
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    connection.connect_ex(sockaddr)  # its error comes back from recv
    selector.register(connection, selectors.EVENT_READ, _Query(endpoint, connection))


def _receive(query: _Query) -> bool:
    """Receives available bytes; returns whether more may come."""
    try:
        data = query.connection.recv(_BYTES_MAX)
    except BlockingIOError:
        return True
    except OSError:
        query.received.clear()
        return False
    query.received += data
    return bool(data) and len(query.received) < _BYTES_MAX
