"""Memory that the ranks of a host share while a job runs: one rank makes it and passes its descriptor to the others.

The giver listens on an abstract unix socket of random name. Name and token reach the takers by a collective of the job,
which is authenticated; a taker proves itself by the token. Both ends belong to one user.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from horo.bootstrap.auth.handshake import HandshakeError
from horo.bootstrap.host.arena import check_user, receive_descriptors, send_descriptors
from horo.errors import ResourceError

__all__ = ["FileAddress", "FileGiver", "take_file"]

_TOKEN_BYTES = 32
_CHECK_S = 0.2
_EACH_S = 5.0
"""Longest time that one connection may take, with the others behind it."""


@dataclass(frozen=True)
class FileAddress:
    """The way to a giver, for the ranks that take its file."""

    name: bytes
    token: bytes = field(repr=False)


class FileGiver:
    """Passes one descriptor to a known number of processes; listens from its construction until ``close``.

    Raises:
        ResourceError: no socket can be made.
    """

    def __init__(self) -> None:
        self.address = FileAddress(b"\0horo-" + secrets.token_hex(16).encode(), secrets.token_bytes(_TOKEN_BYTES))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(self.address.name)
            self._listener.listen(1024)
            self._listener.setblocking(False)
        except OSError as error:
            self._listener.close()
            raise ResourceError(f"cannot listen on an abstract unix socket: {error.strerror}") from error

    def give(self, descriptor: int, takers: int, timeout_s: float, check: Callable[[], None]) -> None:
        """Passes the descriptor ``takers`` times; blocks until then.

        Args:
            descriptor: stays the caller's.
            takers: how many processes come.
            timeout_s: the longest wait.
            check: called while nobody comes; raises to give up.

        Raises:
            ResourceError: not all have come in time.
        """
        deadline = time.monotonic() + timeout_s
        given = 0
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while given < takers:
                check()
                if time.monotonic() >= deadline:
                    raise ResourceError(f"{takers - given} of {takers} ranks did not come for shared memory")
                if selector.select(_CHECK_S):
                    given += self._serve(descriptor)

    def _serve(self, descriptor: int) -> bool:
        """Whether the next connection is a taker's, which has the descriptor now."""
        connection, _ = self._listener.accept()
        with connection:
            try:
                connection.settimeout(_EACH_S)
                check_user(connection)
                token = connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
                if not hmac.compare_digest(token, self.address.token):
                    return False
                send_descriptors(connection, [descriptor])
            except (OSError, HandshakeError):
                return False
        return True

    def close(self) -> None:
        """Listens no longer."""
        self._listener.close()


def take_file(address: FileAddress, timeout_s: float) -> int:
    """The descriptor that a ``FileGiver`` gives, close-on-exec, which the caller owns.

    Raises:
        ResourceError: the giver is gone, belongs to another user or gave nothing in time.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(timeout_s)
            connection.connect(address.name)
            check_user(connection)
            connection.sendall(address.token)
            return receive_descriptors(connection, 1)[0]
        except (OSError, HandshakeError) as error:
            raise ResourceError(f"shared memory did not come from the first rank of this host: {error}") from error
