"""The end of ``--attach`` in the hororun of a job: a Unix socket for processes of the same user.

The socket has no file, so nothing is left behind however hororun ends. The user of a process that has connected comes
from the kernel, and another user is refused before a byte is read.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from horo.runner.job.output import LineSplitter
from horo.runner.text import printable

if TYPE_CHECKING:
    from horo.runner.loop import Loop

__all__ = ["ATTACH_LINE", "STACKS", "WATCH", "AttachServer", "address_of", "peer_of"]

ATTACH_LINE = b"live "
"""Begins the line that is redrawn; other lines are those of ranks."""
WATCH, STACKS = b"watch\n", b"stacks\n"
_CREDENTIALS = struct.Struct("3i")
_OF_STACK = re.compile(
    rb'(Stack|Current thread|Thread) .*\(most recent call first\)|  File ".*", line \d+ in |  \.\.\.$'
)
"""As ``faulthandler`` writes them."""
_CLIENTS_MAX = 16
_REQUEST_BYTES = 64


def address_of(pid: int) -> str:
    """The name of the socket of a hororun."""
    return f"\0horo/hororun/{pid}"


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, from the kernel."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(found)
    return pid, user


class AttachServer:
    """Processes that show the job to somebody.

    Args:
        loop: calls back.
        changed: is called when somebody has come or left.
        show_stacks: is called when somebody asks for the stacks of the ranks.
    """

    def __init__(self, loop: Loop, changed: Callable[[], None], show_stacks: Callable[[], None]) -> None:
        self._loop, self._changed, self._show_stacks = loop, changed, show_stacks
        self._clients: dict[socket.socket, bytes] = {}
        """Each with what it has asked for."""
        self._splitters: dict[int, LineSplitter] = {}
        self._listener: socket.socket | None = None
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(address_of(os.getpid()))
            listener.listen(_CLIENTS_MAX)
        except OSError:  # nobody can attach, and the job runs
            listener.close()
            return
        listener.setblocking(False)
        self._listener = listener
        loop.watch(listener.fileno(), read=self._accept)

    @property
    def is_watched(self) -> bool:
        """Whether somebody waits for the line."""
        return WATCH in self._clients.values()

    def show(self, text: str) -> None:
        """Sends the line to those who watch."""
        self._send(WATCH, ATTACH_LINE + printable(text).encode() + b"\n")

    def copy(self, rank: int, data: bytes) -> None:
        """A rank has written to stderr: sends the lines of stacks to those who have asked for them."""
        if STACKS not in self._clients.values():
            self._splitters.clear()
            return
        for piece in self._splitters.setdefault(rank, LineSplitter()).feed(data):
            if _OF_STACK.match(piece.text):
                text = printable(piece.text.decode("utf-8", "replace"))
                self._send(STACKS, f"[{rank}] {text}\n".encode())

    def close(self) -> None:
        """Sends everybody away."""
        if self._listener is not None:
            self._loop.watch(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for client in list(self._clients):
            self._drop(client)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept() if self._listener is not None else (None, None)
            if client is None:
                return
            _, user = peer_of(client)
            if user not in (os.geteuid(), 0) or len(self._clients) >= _CLIENTS_MAX:
                client.close()
                return
            client.setblocking(False)
            self._clients[client] = b""
            self._loop.watch(client.fileno(), read=lambda: self._read(client))

    def _read(self, client: socket.socket) -> None:
        try:
            data = client.recv(_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        asked = self._clients[client] + data
        if not data or not (WATCH.startswith(asked) or STACKS.startswith(asked)):
            self._drop(client)
            self._changed()
            return
        self._clients[client] = asked
        if asked == STACKS:
            self._show_stacks()
        self._changed()

    def _send(self, asked: bytes, data: bytes) -> None:
        for client in [client for client, wanted in self._clients.items() if wanted == asked]:
            try:
                is_sent = client.send(data) == len(data)
            except OSError:
                is_sent = False
            if not is_sent:  # it does not read, and would get half a line
                self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        del self._clients[client]
        self._loop.watch(client.fileno())
        client.close()
