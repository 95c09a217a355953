"""Messages between the driver of a contest and its ranks: JSON, one line each, over one socket per rank.

The socket lies in the contest's own folder, where ranks in other network namespaces find it too.
Used on both sides, also by ranks whose environment has neither torch nor horo.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

Message = dict[str, Any]

LINE_MAX = 16 << 20


class ChannelClosed(Exception):
    """The other end is gone."""


class Channel:
    """One connected socket. Reads block; the driver reads only after its selector has said that there is something."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._buffer = bytearray()
        self._ready: list[Message] = []

    @classmethod
    def dial(cls, path: str) -> Channel:
        """Connects to the driver that listens at ``path``."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        return cls(connection)

    def peer(self) -> tuple[int, int]:
        """Process and user at the other end, as the kernel knows them."""
        raw = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        process, user, _ = struct.unpack("3i", raw)
        return process, user

    def send(self, message: Message) -> None:
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> Message:
        """The next message; waits for it, asleep."""
        while not self._ready:
            self._read()
        return self._ready.pop(0)

    def receive_all(self) -> list[Message]:
        """What has arrived, at least one message or a part of one; waits if nothing has."""
        if not self._ready:
            self._read()
        messages, self._ready = self._ready, []
        return messages

    def has_message(self) -> bool:
        """Whether a message is here already, which no selector can see."""
        return bool(self._ready)

    def _read(self) -> None:
        try:
            data = self.socket.recv(1 << 16)
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not data or len(self._buffer) > LINE_MAX:
            raise ChannelClosed("a message without an end" if data else "the other end closed")
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        self._ready += [json.loads(line) for line in lines]

    def close(self) -> None:
        self.socket.close()
