"""Messages between hororun and its agent on a remote host, over the two pipes of one ssh or srun.

A message is kind (1 byte), rank (4 bytes), length of the payload (4 bytes), payload, a newline; numbers in network
order. The newline is for srun, which holds back what looks to it like a line without an end. The agent writes
:data:`MAGIC` first, because a login shell may print something before the agent runs.
"""

from __future__ import annotations

import json
import struct
from enum import IntEnum
from typing import Any, NamedTuple

__all__ = [
    "MAGIC",
    "PAYLOAD_MAX_BYTES",
    "PING_S",
    "Kind",
    "Message",
    "MessageError",
    "MessageReader",
    "encode",
    "encode_json",
]

MAGIC = b"\nhororun agent 1\n"
PAYLOAD_MAX_BYTES = 64 << 20
PING_S = 1.0
"""The time between two signs of life of either side.

TCP repeats lost data after growing pauses, each as long as all before. So data that was sent just before an outage has
arrived once the link is there again for as long as it was gone. Data that was sent long before shows nothing.
"""
_NOISE_MAX_BYTES = 1 << 20
_HEADER = struct.Struct("!BII")
_END = b"\n"


class Kind(IntEnum):
    """The kinds of messages. The comments name the sender."""

    HOST_INFO = 1  # agent: JSON, facts about its host; once, first
    STARTED = 2  # agent: JSON, pid of the rank
    STDOUT = 3  # agent: bytes that the rank wrote
    STDERR = 4  # agent: bytes that the rank wrote
    EXITED = 5  # agent: JSON, how the rank ended; after all its output
    FAILED = 6  # agent: JSON, why the job cannot run here; last
    NOTE = 7  # agent: bytes that the rank wrote to its pipe for notes
    LISTENING = 8  # agent: JSON, the port that LISTEN has opened, or why there is none
    REACHED = 9  # agent: JSON, the peers of REACH that do not answer
    SIGNALLED = 10  # agent: JSON, the number of a signal that came to it, and that its ranks have got
    REMAINED = 11  # agent: JSON, the processes of the job that it cannot end
    NOT_STARTED = 12  # agent: JSON, why a worker of START does not run
    LEAVING = 13  # agent of an elastic job: SIGTERM has come to it, and its host is about to end
    JOB = 16  # launcher: JSON, the job; once, first. Without ranks: workers come later, by START
    TERMINATE = 17  # launcher: SIGTERM now, SIGKILL after the grace time
    KILL = 18  # launcher: SIGKILL now
    PING = 19  # both: it is still there
    LISTEN = 22  # launcher: JSON, for --check-hosts: open a port
    REACH = 23  # launcher: JSON, the ports of other hosts to try
    SIGNAL = 21  # launcher: JSON, the number of a signal for the ranks
    INTERRUPT = 20  # launcher: SIGINT now, SIGTERM after the grace time, SIGKILL after it again
    START = 24  # launcher: JSON, the slot and the environment of a worker, whose number is in the place of a rank
    WATCH = 26  # launcher: JSON, how often the counts of all ranks are to be reported, as notes; 0: not
    STACKS = 27  # launcher: each rank shows its stack on its stderr
    END = 25  # launcher: JSON, whether one worker gets SIGTERM, and SIGKILL after the grace time, or SIGKILL now


class Message(NamedTuple):
    """One message; ``rank`` is the number of a worker in an elastic job, and 0 where it has no meaning."""

    kind: Kind
    rank: int
    payload: bytes

    def json(self) -> dict[str, Any]:
        """The payload as a JSON object.

        Raises:
            MessageError: it is another value, or not JSON.
        """
        try:
            value = json.loads(self.payload)
        except RecursionError:
            raise MessageError(f"a {self.kind.name} message is nested too deeply") from None
        except ValueError as error:
            raise MessageError(f"a {self.kind.name} message is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise MessageError(f"a {self.kind.name} message is not a JSON object")
        return value

    def __repr__(self) -> str:
        # The payloads of JOB and START hold the secret.
        shown = f"{len(self.payload)} bytes" if self.kind in (Kind.JOB, Kind.START) else repr(self.payload)
        return f"Message({self.kind.name}, rank {self.rank}, {shown})"


class MessageError(ValueError):
    """The other side does not speak this protocol."""


def encode(kind: Kind, rank: int = 0, payload: bytes = b"") -> bytes:
    """One message as bytes."""
    return _HEADER.pack(kind, rank, len(payload)) + payload + _END


def encode_json(kind: Kind, value: dict[str, Any], rank: int = 0) -> bytes:
    """One message with a JSON object; bytes of the environment that are no text survive as surrogates."""
    return encode(kind, rank, json.dumps(value).encode("ascii"))


class MessageReader:
    """Cuts a stream of bytes into messages; with ``magic``, drops the bytes before :data:`MAGIC`."""

    def __init__(self, *, magic: bool) -> None:
        self._buffer = bytearray()
        self._waiting = magic

    @property
    def waiting(self) -> bool:
        """Whether :data:`MAGIC` has yet to come."""
        return self._waiting

    def feed(self, data: bytes) -> list[Message]:
        """The messages that ``data`` completes.

        Raises:
            MessageError: the bytes are no message.
        """
        self._buffer += data
        if self._waiting and not self._skip_noise():
            return []
        messages = []
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            kind, rank, length = _HEADER.unpack_from(self._buffer, start)
            if kind not in Kind.__members__.values() or length > PAYLOAD_MAX_BYTES:
                raise MessageError(f"a message of kind {kind} with {length} bytes is none of ours")
            end = start + _HEADER.size + length
            if len(self._buffer) <= end:
                break
            if self._buffer[end : end + 1] != _END:
                raise MessageError(f"a {Kind(kind).name} message of {length} bytes does not end where it should")
            messages.append(Message(Kind(kind), rank, bytes(self._buffer[start + _HEADER.size : end])))
            start = end + 1
        del self._buffer[:start]
        return messages

    def _skip_noise(self) -> bool:
        found = self._buffer.find(MAGIC)
        if found < 0:
            if len(self._buffer) > _NOISE_MAX_BYTES:
                raise MessageError("the remote login shell prints without end")
            return False
        del self._buffer[: found + len(MAGIC)]
        self._waiting = False
        return True
