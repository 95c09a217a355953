"""Slow links between ranks: a thread that passes bytes on late or in small pieces."""

import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from horo.bootstrap.auth.handshake import Purpose

_READ_BYTES = 1 << 16
_QUEUE_BYTES = 1 << 20
"""What one direction holds back at most; then the sender meets a full link."""
_JOIN_S = 10.0


@dataclass(frozen=True)
class Relay:
    """How links are slowed; what says nothing about a kind of link leaves it as it is."""

    control_delay_s: float = 0.0
    """Every byte, and the end, arrives so much later."""
    data_delay_s: float = 0.0
    control_chunk_bytes: int = 0
    """At most so many bytes are passed on at once; 0: all there are."""
    data_chunk_bytes: int = 0
    chunk_pause_s: float = 0.0002
    """Between two chunks of a direction."""

    def of(self, purpose: Purpose) -> tuple[float, int]:
        """Delay and chunk of one kind of link."""
        if purpose is Purpose.CONTROL:
            return self.control_delay_s, self.control_chunk_bytes
        return self.data_delay_s, self.data_chunk_bytes


class _Way:
    """One direction of one link."""

    def __init__(self, source: socket.socket, target: socket.socket, delay_s: float, chunk_bytes: int, pause_s: float):
        self.source = source
        self.target = target
        self._delay_s = delay_s
        self._chunk_bytes = chunk_bytes
        self._pause_s = pause_s
        self._queue: deque[tuple[float, memoryview]] = deque()
        """When each may be passed on; without bytes: the end."""
        self._queued_bytes = 0
        self._next_s = 0.0
        self._has_ended = False
        self.is_blocked = False

    @property
    def reads(self) -> bool:
        return not self._has_ended and self._queued_bytes < _QUEUE_BYTES

    def read(self) -> None:
        try:
            data = self.source.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._has_ended = data == b""
        self._queue.append((time.monotonic() + self._delay_s, memoryview(data)))
        self._queued_bytes += len(data)

    def forward(self, now_s: float) -> float:
        """Passes on what is due; when to come again."""
        while self._queue and not self.is_blocked:
            due_s = max(self._queue[0][0], self._next_s)
            if due_s > now_s:
                return due_s
            self._pass_on(*self._queue.popleft())
            if self._chunk_bytes:
                self._next_s = now_s + self._pause_s
        return math.inf

    def _pass_on(self, due_s: float, data: memoryview) -> None:
        if not data:
            with suppress(OSError):
                self.target.shutdown(socket.SHUT_WR)
            return
        try:
            sent = self.target.send(data[: self._chunk_bytes or len(data)])
        except BlockingIOError:
            sent, self.is_blocked = 0, True
        except OSError:
            self._give_up()
            return
        self._queued_bytes -= sent
        if sent < len(data):
            self._queue.appendleft((due_s, data[sent:]))

    def _give_up(self) -> None:
        """Nobody reads there any more: the sender shall see that."""
        self._queue.clear()
        self._queued_bytes = 0
        self._has_ended = True
        with suppress(OSError):
            self.source.shutdown(socket.SHUT_RD)


class Relays:
    """All slow links of a group, served by one thread until ``close``."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._ways: list[_Way] = []
        self._wake, self._waker = os.pipe()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def connect(self, purpose: Purpose, pair: Callable[[], tuple[int, int]]) -> tuple[int, int]:
        """The two ends of a link of this kind, which ``pair`` makes; only before ``start``."""
        delay_s, chunk_bytes = self._relay.of(purpose)
        if not delay_s and not chunk_bytes:
            return pair()
        (here, near), (far, there) = pair(), pair()
        ends = [socket.socket(fileno=fd) for fd in (near, far)]
        for end in ends:
            end.setblocking(False)
        pause_s = self._relay.chunk_pause_s
        self._ways += [_Way(one, other, delay_s, chunk_bytes, pause_s) for one, other in (ends, ends[::-1])]
        return here, there

    def start(self) -> None:
        """Begins to pass bytes on."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and closes all links; raises what went wrong in the thread."""
        os.close(self._waker)
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                raise TimeoutError(f"the relay has not ended within {_JOIN_S:g} s")
        os.close(self._wake)
        for way in self._ways:
            way.source.close()  # each socket is the source of one way
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            self._error = error

    def _turn(self) -> bool:
        """False: it is time to end."""
        next_s = min([way.forward(time.monotonic()) for way in self._ways], default=math.inf)
        sources = {way.source.fileno(): way for way in self._ways if way.reads}
        targets = {way.target.fileno(): way for way in self._ways if way.is_blocked}
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        for fd in sources.keys() | targets.keys():
            poller.register(fd, (select.POLLIN if fd in sources else 0) | (select.POLLOUT if fd in targets else 0))
        for fd, events in poller.poll(self._patience_ms(next_s)):
            if fd == self._wake:
                return False
            if fd in sources and events & ~select.POLLOUT:
                sources[fd].read()
            if fd in targets and events & ~select.POLLIN:
                targets[fd].is_blocked = False
        return True

    def _patience_ms(self, next_s: float) -> float | None:
        """How long to poll; what is shorter than poll counts is slept here."""
        if next_s == math.inf:
            return None
        left_s = next_s - time.monotonic()
        if left_s < 0.001:
            time.sleep(max(left_s, 0))
            return 0
        return left_s * 1000
