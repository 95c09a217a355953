"""Something in the middle of the links between simulated hosts: passes everything on and notes what depends on what.

Each host has a clock in the sense of Lamport (1978): a message carries one more than the clock of its sender, and its
receiver's clock becomes at least that. So the largest number is the length of the longest chain of messages.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Relay", "Seen", "cut_in"]

LENGTH_BYTES = 4  # in front of each message


class Seen(NamedTuple):
    """What has passed since ``begin``."""

    messages: int
    bytes: int
    hops: int


@dataclass
class _End:
    """One socket of the relay: what comes out of it was sent by ``sender`` and goes to ``receiver`` by ``onward``."""

    connection: socket.socket
    sender: int
    receiver: int
    onward: socket.socket
    unread: bytearray = field(default_factory=bytearray)

    def take_message(self) -> bytes | None:
        """The first message, with its length in front, if it is all there."""
        size_bytes = LENGTH_BYTES + int.from_bytes(self.unread[:LENGTH_BYTES], "little")
        if len(self.unread) < size_bytes:
            return None
        message = bytes(self.unread[:size_bytes])
        del self.unread[:size_bytes]
        return message


class Relay(threading.Thread):
    """Ends by itself when all links have ended."""

    def __init__(self, ends: list[_End]) -> None:
        super().__init__(daemon=True)
        self._ends = ends
        self._lock = threading.Lock()
        self._clocks: dict[int, int] = {}
        self._messages = self._bytes = 0

    def begin(self) -> None:
        """Forgets what it has seen; nothing may be on its way."""
        with self._lock:
            self._clocks, self._messages, self._bytes = {}, 0, 0

    def seen(self) -> Seen:
        with self._lock:
            return Seen(self._messages, self._bytes, max(self._clocks.values(), default=0))

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for end in self._ends:
                selector.register(end.connection, selectors.EVENT_READ, end)
            open_ends = len(self._ends)
            while open_ends > 0:
                for key, _ in selector.select():
                    if not self._pass_on(key.data):
                        selector.unregister(key.fileobj)
                        open_ends -= 1
        for end in self._ends:
            end.connection.close()

    def _pass_on(self, end: _End) -> bool:
        try:
            data = end.connection.recv(1 << 16)
            end.unread += data
            while (message := end.take_message()) is not None:
                self._note(end, len(message))
                end.onward.sendall(message)
            if not data:
                end.onward.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            return False  # at the end, when hosts leave while others still say goodbye to them
        return bool(data)

    def _note(self, end: _End, size_bytes: int) -> None:
        with self._lock:
            self._messages += 1
            self._bytes += size_bytes
            hop = self._clocks.get(end.sender, 0) + 1
            self._clocks[end.receiver] = max(self._clocks.get(end.receiver, 0), hop)


def cut_in(links: Mapping[tuple[int, int], int]) -> tuple[Relay, dict[tuple[int, int], int]]:
    """Cuts links between hosts in two and puts a relay in between.

    Args:
        links: for (host, other) the descriptor of the host's end of the link; the relay takes it over.

    Returns:
        The relay, to be started, and for (host, other) the descriptor that the host gets instead.
    """
    ends, replaced = [], {}
    for (host, other), fd in links.items():
        far = socket.socket(fileno=fd)
        near, given = socket.socketpair()
        replaced[host, other] = given.detach()
        ends.append(_End(near, host, other, far))
        ends.append(_End(far, other, host, near))
    return Relay(ends), replaced
