"""Listening sockets that accept members of the job only.

Other connections cost little: the number of unfinished handshakes is bounded, and they use a quarter of the descriptors
at most. Each has a deadline and no thread, and the log gets a few lines a minute, one per address. At the bound, no
further connection is accepted and the oldest handshake gets less time, so that many silent connections cannot keep
members out.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from horo.bootstrap.auth.handshake import FULL, WELCOME, Acceptor, HandshakeError, HandshakeResult, check_secret
from horo.bootstrap.net.open_files import open_files_max
from horo.bootstrap.net.selector_thread import SelectorThread

__all__ = ["Listener", "ListenerThread", "RefusalLog"]

HALF_OPEN_MAX = 256
HANDSHAKE_TIMEOUT_S = 5.0
CROWDED_TIMEOUT_S = 0.25
"""Time for a handshake while the number of unfinished handshakes is at its bound."""
_NO_DESCRIPTOR_PAUSE_S = 0.1
_ACCEPTS_PER_TURN = 64
_UNREAD_BYTES = 4096


class RefusalLog:
    """Reports refused connections, in a minute once per address and ``_LINES_MAX`` times in all."""

    _INTERVAL_S = 60.0
    _LINES_MAX = 20
    _ADDRESSES_MAX = 1024

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._last: dict[str, tuple[float, int]] = {}
        self._since, self._lines, self._others = -self._INTERVAL_S, 0, 0

    def refuse(self, address: str, reason: str, now: float) -> None:
        """Reports one refused connection from ``address``, or counts it for the next report."""
        last, suppressed = self._last.get(address, (-self._INTERVAL_S, 0))
        if now - last < self._INTERVAL_S:
            self._last[address] = (last, suppressed + 1)
            return
        if now - self._since >= self._INTERVAL_S:
            self._since, self._lines = now, 0
        if self._lines >= self._LINES_MAX:
            self._others += 1
            return
        self._lines += 1
        if len(self._last) >= self._ADDRESSES_MAX:
            self._last.clear()
        self._last[address] = (now, 0)
        suppressed, self._others = suppressed + self._others, 0
        more = f" ({suppressed} more refused since the last report)" if suppressed else ""
        try:
            self._report(f"refused a connection from {address}: {reason}{more}")
        except Exception:  # an error in a report must not end the service
            logging.getLogger("horo").exception("reporting a refused connection failed")


@dataclass
class _HalfOpen:
    """A connection that was accepted at ``since`` and is not yet authenticated."""

    connection: socket.socket
    acceptor: Acceptor
    address: str
    since: float


class Listener:
    """Authenticates all connections; the selector of its owner drives it.

    The ``data`` of every key registered here is a function without arguments: call it when the key is ready.
    Call ``expire`` after each turn and sleep no longer than ``timeout_s``. Not thread-safe.

    Args:
        selector: the owner's selector; this registers and unregisters its own sockets only.
        listeners: nonblocking listening sockets, which this object closes.
        secret: the job's secret, at least ``SECRET_BYTES_MIN`` bytes.
        admit: checks what an authenticated peer claims; raises HandshakeError to refuse it.
        on_peer: called with each admitted, nonblocking connection.
        on_refused: called with one sentence per refusal that is reported.
        half_open_max: most connections whose handshake is not finished; fewer if this process may open few files.
        screen: checks a connection before anything is read from it; raises HandshakeError to refuse it.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listeners: Sequence[socket.socket],
        secret: bytes,
        *,
        admit: Callable[[socket.socket, HandshakeResult], None],
        on_peer: Callable[[socket.socket, HandshakeResult], None],
        on_refused: Callable[[str], None],
        screen: Callable[[socket.socket], None] = lambda connection: None,
        half_open_max: int = HALF_OPEN_MAX,
        deadline_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        check_secret(secret)
        self._selector = selector
        self._listeners = list(listeners)
        self._secret = secret
        self._admit = admit
        self._screen = screen
        self._on_peer = on_peer
        self._log = RefusalLog(on_refused)
        self._half_open_max = _affordable(half_open_max)
        self._deadline_s = deadline_s
        self._half_open: dict[int, _HalfOpen] = {}
        self._listening = False
        self._paused_until = 0.0
        self._spare = -1
        """A descriptor that is given up for those who are turned away when there is no other."""
        self._listen()

    @property
    def half_open_count(self) -> int:
        """Connections whose handshake is not finished."""
        return len(self._half_open)

    def timeout_s(self, now: float) -> float | None:
        """Seconds until the next call of ``expire`` is due; None without one."""
        times = [self._paused_until] if self._paused_until > now else []
        if self._half_open:
            oldest = next(iter(self._half_open.values()))
            times.append(oldest.since + self._handshake_timeout_s())
        return max(min(times) - now, 0.0) if times else None

    def expire(self, now: float) -> None:
        """Refuses the handshakes whose time is over, and resumes listening if it was paused."""
        for half_open in list(self._half_open.values()):
            if half_open.since + self._handshake_timeout_s() > now:
                break
            self._refuse(half_open, "it did not finish the handshake in time")
        if not self._listening and now >= self._paused_until and len(self._half_open) < self._half_open_max:
            self._listen()

    def close(self) -> None:
        """Closes the listeners and all unfinished handshakes; admitted connections stay open."""
        self._stop_listening()
        for half_open in list(self._half_open.values()):
            self._forget(half_open)
            half_open.connection.close()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _handshake_timeout_s(self) -> float:
        crowded = len(self._half_open) >= self._half_open_max
        return min(self._deadline_s, CROWDED_TIMEOUT_S) if crowded else self._deadline_s

    def _listen(self) -> None:
        self._listening = True
        self._keep_spare()
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, lambda listener=listener: self._accept(listener))

    def _stop_listening(self) -> None:
        if self._listening:
            self._listening = False
            for listener in self._listeners:
                self._selector.unregister(listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if len(self._half_open) >= self._half_open_max:
                self._stop_listening()
                return
            try:
                connection, sockaddr = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EMFILE:
                    self._turn_away(listener)
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                    self._paused_until = time.monotonic() + _NO_DESCRIPTOR_PAUSE_S
                    self._stop_listening()
                return
            self._take(connection, _name(sockaddr))

    def _turn_away(self, listener: socket.socket) -> None:
        """Says to those who wait that this process can open no further file: nothing else would tell them."""
        if self._spare < 0:
            return
        os.close(self._spare)
        self._spare = -1
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, sockaddr = listener.accept()
            except OSError:
                break
            with connection:
                connection.setblocking(False)
                with contextlib.suppress(OSError):
                    connection.recv(_UNREAD_BYTES)  # what is left unread makes the close a reset, which drops the reply
                with contextlib.suppress(OSError):
                    connection.send(FULL)
            reason = f"this process has opened all the {open_files_max()} files it may; raise that limit (ulimit -n)"
            self._log.refuse(_name(sockaddr), reason, time.monotonic())
        self._keep_spare()

    def _keep_spare(self) -> None:
        if self._spare < 0:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _take(self, connection: socket.socket, address: str) -> None:
        connection.setblocking(False)
        try:
            self._screen(connection)
        except HandshakeError as error:
            connection.close()
            self._log.refuse(address, str(error), time.monotonic())
            return
        half_open = _HalfOpen(connection, Acceptor(self._secret, connection.getsockname()), address, time.monotonic())
        self._half_open[connection.fileno()] = half_open
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._advance(half_open))

    def _advance(self, half_open: _HalfOpen) -> None:
        acceptor = half_open.acceptor
        try:
            data = half_open.connection.recv(acceptor.missing_bytes)
            if not data:
                raise ConnectionResetError
            reply = acceptor.feed(data)
            if reply:
                half_open.connection.sendall(reply)
            if acceptor.result is not None:
                self._admit(half_open.connection, acceptor.result)
                half_open.connection.sendall(WELCOME)
        except BlockingIOError:
            return
        except HandshakeError as error:
            self._refuse(half_open, str(error), error.reply)
            return
        except OSError:
            # Members dial several addresses of one listener at once, close all connections but the first, and may end
            # at any time: no refusal.
            self._forget(half_open)
            half_open.connection.close()
            return
        if acceptor.result is not None:
            self._forget(half_open)
            self._on_peer(half_open.connection, acceptor.result)

    def _refuse(self, half_open: _HalfOpen, reason: str, reply: bytes = b"") -> None:
        self._forget(half_open)
        if reply:
            with contextlib.suppress(OSError):
                half_open.connection.send(reply)
        half_open.connection.close()
        self._log.refuse(half_open.address, reason, time.monotonic())

    def _forget(self, half_open: _HalfOpen) -> None:
        self._selector.unregister(half_open.connection)
        del self._half_open[half_open.connection.fileno()]


def _name(sockaddr: object) -> str:
    return str(sockaddr[0]) if isinstance(sockaddr, tuple) else "this machine"


def _affordable(count: int) -> int:
    """The smaller of ``count`` and a quarter of this process's descriptors, so that most are left for other uses."""
    limit = open_files_max()
    return count if limit == resource.RLIM_INFINITY else max(min(count, limit // 4), 1)


class ListenerThread:
    """A listener with a thread of its own, for owners that do other work while peers connect.

    Args:
        listeners: nonblocking listening sockets, which this object closes.
        secret: the job's secret.
        admit: as for ``Listener``, called on the thread.
        on_peer: as for ``Listener``, called on the thread.
        on_refused: as for ``Listener``, called on the thread.
        screen: as for ``Listener``, called on the thread.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        secret: bytes,
        *,
        admit: Callable[[socket.socket, HandshakeResult], None],
        on_peer: Callable[[socket.socket, HandshakeResult], None],
        on_refused: Callable[[str], None],
        screen: Callable[[socket.socket], None] = lambda connection: None,
    ) -> None:
        self._thread = SelectorThread("horo-listener")
        listener = Listener(
            self._thread.selector, listeners, secret, admit=admit, on_peer=on_peer, on_refused=on_refused, screen=screen
        )
        self._thread.start(on_end=listener.close, on_turn=listener.expire, timeout_s=listener.timeout_s)

    def close(self) -> None:
        """Stops admitting, ends the thread, closes the listeners; idempotent."""
        self._thread.close()
