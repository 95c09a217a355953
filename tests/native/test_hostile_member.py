"""A member of the job, which has proven the secret, sends a leader damaged messages.

Whatever the leader makes of them, also under AddressSanitizer: it goes on, or the job ends with an error.
"""

import random
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import native_build
import numpy as np
import pytest
import wire_oracle
from ranks import Group, Rank

from horo.core.setup import Setup
from horo.errors import HoroError

LENGTH_BYTES = 4
MESSAGES_MAX = 24
"""The message that is damaged is among the first so many of its direction."""
CUT_S = 10.0
"""When the connection ends where a damaged message has left ranks waiting for each other."""


def damage(message: bytes, rng: random.Random) -> bytes:
    """What travels instead of a message, with the length in front."""
    start = rng.randrange(len(message))
    count = rng.randrange(1, 9)
    changed = bytearray(message)
    changed[start] ^= 1 << rng.randrange(8)
    samples = list(wire_oracle.samples().values())
    return rng.choice(
        [
            lambda: wire_oracle.framed(bytes(changed)),
            lambda: wire_oracle.framed(message[:start] + b"\xff" * count + message[start + count :]),
            lambda: wire_oracle.framed(message[:start] + bytes(count) + message[start + count :]),
            lambda: wire_oracle.framed(message[:start]),
            lambda: wire_oracle.framed(message + rng.randbytes(count)),
            lambda: wire_oracle.framed(message) * 2,
            lambda: wire_oracle.framed(rng.choice(samples)) + wire_oracle.framed(message),
            lambda: wire_oracle.framed(rng.choice(samples)),
        ]
    )()


class Between:
    """Passes on what two leaders send each other, one message of one of them damaged."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._sender = rng.randrange(2)
        self._place = rng.randrange(MESSAGES_MAX)
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._cut = threading.Timer(CUT_S, self._shut)
        self.has_damaged = False

    def rewire(self, setups: Sequence[Setup]) -> list[Setup]:
        """The setups of two hosts with this between their leaders."""
        first, second = setups
        near, far = socket.socketpair()
        near.setblocking(False)
        self._ends = [socket.socket(fileno=second.control_fds[0]), far]
        for end in self._ends:
            end.setblocking(True)
        for sender in range(2):
            thread = threading.Thread(target=self._pass, args=(sender,), daemon=True)
            self._threads.append(thread)
            thread.start()
        self._cut.start()
        return [first, replace(second, control_fds=[near.detach(), *second.control_fds[1:]])]

    def close(self) -> None:
        self._cut.cancel()
        self._shut()
        for thread in self._threads:
            thread.join(20)
        for end in self._ends:
            end.close()

    def _shut(self) -> None:
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _pass(self, sender: int) -> None:
        source, sink = self._ends[sender], self._ends[1 - sender]
        count = 0
        with suppress(OSError):
            while length := source.recv(LENGTH_BYTES, socket.MSG_WAITALL):
                message = source.recv(int.from_bytes(length, "little"), socket.MSG_WAITALL)
                hit = sender == self._sender and count == self._place
                sent = length + message
                while hit and sent == length + message:  # zeros in the place of zeros are no damage
                    sent = damage(message, self._rng)
                self.has_damaged |= hit
                sink.sendall(sent)
                count += 1
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def work(rank: Rank, kept: list[np.ndarray]) -> None:
    """Some of everything; ``kept`` holds the memory of operations that are in progress when another one fails."""
    with suppress(HoroError, ValueError):  # ValueError: results that do not fit the test's own arithmetic
        for _ in range(8):
            rank.allreduce(np.ones(10, np.int32), "small")
            rank.allgather(np.ones((rank.rank + 1, 2), np.int8))
            rank.broadcast(np.ones(4, np.int8), 1)
            rank.allreduce(np.ones(6000), "large")
            arrays = [np.ones(3) for _ in range(4)]
            kept += arrays
            handles = [rank.submit("allreduce", f"m{i}", [array], reduce_op=1) for i, array in enumerate(arrays)]
            rank.finish(*handles)
            moved = [np.ones(20_000) for _ in range(2)]
            kept += moved
            rank.finish(rank.receive(moved[0]), rank.send(moved[1], 1 - rank.rank))
            rank.barrier()


@pytest.mark.skipif(native_build.FLAVOUR == "thread", reason="what is looked for is memory, which the other one checks")
@pytest.mark.parametrize("seed", range(16))
def test_a_damaged_message_of_a_member_ends_the_job_or_nothing(seed: int) -> None:
    between = Between(random.Random(seed))
    kept: list[np.ndarray] = []
    try:
        with Group([1, 1], rewire=between.rewire, stall_warning_ms=300, stall_shutdown_ms=1000) as group:
            group.run(lambda rank: work(rank, kept))
    finally:
        between.close()
    assert between.has_damaged
