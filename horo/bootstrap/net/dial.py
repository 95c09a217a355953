"""Connects to a member of the job that has several addresses."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from horo.bootstrap.auth.handshake import Claim, HandshakeError, HandshakeResult, authenticate
from horo.bootstrap.net.addresses import Endpoint, socket_address
from horo.errors import PeerLostError

__all__ = ["dial"]

_HANDSHAKE_S = 10.0
"""Longer than an acceptor waits for a handshake, so that a dialer does not give up first if the acceptor is busy."""
_ATTEMPT_S = 3.0
"""Long enough for a retransmission: a lost packet of a connection attempt is sent again after 1 s."""
_RETRY_FIRST_S = 0.02
_RETRY_LAST_S = 0.5


def dial(
    endpoints: Sequence[Endpoint],
    secret: bytes,
    claim: Claim,
    timeout_s: float,
    check: Callable[[], None] | None = None,
) -> tuple[socket.socket, HandshakeResult]:
    """Connects to the first of ``endpoints`` that answers and authenticates itself; retries until the time is over.

    All addresses are dialed at once, so one that drops packets does not delay the others. A handshake that has begun
    may take longer than ``timeout_s``. ``check`` is called between attempts and may raise to give up.

    Returns:
        A blocking, close-on-exec stream socket without timeout, and the result of the handshake.

    Raises:
        PeerLostError: none did within ``timeout_s``; the message has the last failure of each address.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _RETRY_FIRST_S
    failures: dict[Endpoint, str] = {}
    while True:
        connected = _race(endpoints, _Attempt(secret, claim, deadline, failures))
        if connected is not None:
            return connected
        if check is not None:
            check()
        if time.monotonic() + pause_s >= deadline:
            break
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, _RETRY_LAST_S)
    told = "; ".join(f"{endpoint}: {failures.get(endpoint, 'no answer')}" for endpoint in endpoints)
    raise PeerLostError(f"no connection within {timeout_s:g} s ({told})")


@dataclass
class _Attempt:
    """One connection to be made: its claim, its deadline, and the failure of each address so far."""

    secret: bytes = field(repr=False)
    claim: Claim
    deadline: float
    failures: dict[Endpoint, str]


def _race(endpoints: Sequence[Endpoint], attempt: _Attempt) -> tuple[socket.socket, HandshakeResult] | None:
    """One attempt at all addresses at once; records in ``failures`` why each one failed."""
    selector = selectors.DefaultSelector()
    pending: dict[Endpoint, socket.socket] = {}
    try:
        for endpoint in endpoints:
            connection = _start(endpoint, attempt.failures)
            if connection is not None:
                pending[endpoint] = connection
                selector.register(connection, selectors.EVENT_WRITE, endpoint)
        give_up = min(attempt.deadline, time.monotonic() + _ATTEMPT_S)
        while pending:
            ready = selector.select(max(give_up - time.monotonic(), 0))
            if not ready:
                attempt.failures.update(dict.fromkeys(pending, "no answer"))
                return None
            for key, _ in ready:
                connection = pending.pop(key.data)
                selector.unregister(connection)
                handshake = _prove(key.data, connection, attempt)
                if handshake is not None:
                    return connection, handshake
        return None
    finally:
        for connection in pending.values():
            connection.close()
        selector.close()


def _start(endpoint: Endpoint, failures: dict[Endpoint, str]) -> socket.socket | None:
    family, sockaddr = socket_address(endpoint.address, endpoint.port)
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    code = connection.connect_ex(sockaddr)
    if code in {0, errno.EINPROGRESS}:
        return connection
    failures[endpoint] = os.strerror(code)
    connection.close()
    return None


def _prove(endpoint: Endpoint, connection: socket.socket, attempt: _Attempt) -> HandshakeResult | None:
    try:
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            attempt.failures[endpoint] = os.strerror(code)
        elif connection.getsockname() == connection.getpeername():
            attempt.failures[endpoint] = os.strerror(errno.ECONNREFUSED)  # TCP's self-connect: no process listens there
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake = authenticate(connection, attempt.secret, attempt.claim, time.monotonic() + _HANDSHAKE_S)
            connection.settimeout(None)
            return handshake
    except HandshakeError as error:
        attempt.failures[endpoint] = str(error)
    except OSError as error:
        attempt.failures[endpoint] = error.strerror or str(error)
    connection.close()
    return None
