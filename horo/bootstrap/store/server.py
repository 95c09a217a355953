"""The server of the job's store: a small authenticated key-value store through which ranks exchange data.

The launcher runs one ``StoreServer``; every rank is a ``StoreClient``. Values are bytes and never unpickled. The server
waits on behalf of its clients, so clients do not poll. One thread serves all of them.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from horo.bootstrap.auth.frames import PAYLOAD_BYTES_MAX, Opener, Sealer, pack_fields
from horo.bootstrap.auth.handshake import HandshakeError, HandshakeResult, Purpose, check_secret
from horo.bootstrap.net.addresses import Endpoint, bind_all
from horo.bootstrap.net.listener import HALF_OPEN_MAX, HANDSHAKE_TIMEOUT_S, Listener
from horo.bootstrap.net.open_files import make_room
from horo.bootstrap.net.selector_thread import SelectorThread
from horo.bootstrap.store.frames import INT64, RECEIVE_BYTES, WAIT_S_MAX, StoreReply, StoreRequest, read_request

__all__ = ["StoreServer"]


@dataclass(eq=False)
class _Waiter:
    """A client waits for ``keys[position]``; all keys before it are there."""

    keys: list[bytes]
    unless: bytes
    deadline: float
    position: int = 0


@dataclass(eq=False)
class _Client:
    """One connection. ``output`` is not sent yet; ``on_disconnect`` is the key and value to set when it ends."""

    connection: socket.socket
    opener: Opener
    sealer: Sealer
    output: bytearray = field(default_factory=bytearray)
    on_disconnect: tuple[bytes, bytes] | None = None


class StoreServer:
    """Serves a store on numeric addresses from one background thread until ``close``.

    Args:
        addresses: numeric IPv4 or IPv6 addresses of this machine, all bound at once, on one port where possible.
        secret: the job's secret, at least 16 bytes.
        port: 0 lets the system choose.
        on_refused: called with one sentence for a refused connection, as ``RefusalLog`` reports them, on the
            server's thread. None: refused connections are not reported.
        half_open_max: most connections whose handshake is not finished.
        handshake_timeout_s: longest time for a handshake.
        ports: where ``port`` is 0, those of which it is to be one.
        clients: number of clients for which this process is to have descriptors, see ``shortage``.

    Raises:
        ResourceError: an address cannot be bound. UsageError: the secret is too short or an address is a name.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        secret: bytes,
        port: int = 0,
        on_refused: Callable[[str], None] | None = None,
        *,
        half_open_max: int = HALF_OPEN_MAX,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        ports: range | None = None,
        clients: int = 0,
    ) -> None:
        check_secret(secret)
        self.shortage = make_room(clients)
        """The lack of descriptors for so many clients, as a phrase, see ``make_room``; empty: none."""
        listeners = bind_all(addresses, port, ports)
        self.endpoints: list[Endpoint] = [Endpoint(*listener.getsockname()[:2]) for listener in listeners]
        self._values: dict[bytes, bytes] = {}
        self._clients: set[_Client] = set()
        self._waiters: dict[_Client, _Waiter] = {}
        self._waiting: dict[bytes, set[_Client]] = {}
        self._connected_count = 0
        self._reply_bytes = 0
        self._clients_changed = threading.Condition()
        self._thread = SelectorThread("horo-store")
        self._selector = self._thread.selector
        self._listener = Listener(
            self._selector,
            listeners,
            secret,
            admit=_admit_store_client,
            on_peer=self._join,
            on_refused=on_refused or (lambda sentence: None),
            half_open_max=half_open_max,
            deadline_s=handshake_timeout_s,
        )
        self._thread.start(on_end=self._close_connections, on_turn=self._expire, timeout_s=self._timeout_s)

    def close(self) -> None:
        """Stops serving and closes every connection; idempotent."""
        self._thread.close()

    @property
    def connected_count(self) -> int:
        """The number of clients that have connected so far."""
        return self._connected_count

    @property
    def reply_bytes(self) -> int:
        """The bytes of all replies so far."""
        return self._reply_bytes

    def wait_for_disconnects(self, count: int, timeout_s: float, connect_timeout_s: float) -> bool:
        """Waits until ``count`` clients have connected and all clients have disconnected; whether that happened.

        Args:
            count: number of clients expected in all.
            timeout_s: longest wait.
            connect_timeout_s: longest wait while a client has not connected yet.
        """
        began = time.monotonic()
        with self._clients_changed:
            while self._clients or self._connected_count < count:
                limit_s = timeout_s if self._connected_count >= count else min(connect_timeout_s, timeout_s)
                left_s = began + limit_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._clients_changed.wait(left_s)
        return True

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _close_connections(self) -> None:
        self._listener.close()
        for client in list(self._clients):
            self._drop(client)

    def _timeout_s(self, now: float) -> float | None:
        deadlines = [waiter.deadline - now for waiter in self._waiters.values()]
        handshake_s = self._listener.timeout_s(now)
        if handshake_s is not None:
            deadlines.append(handshake_s)
        return max(min(deadlines), 0.0) if deadlines else None

    def _expire(self, now: float) -> None:
        self._listener.expire(now)
        for client, waiter in list(self._waiters.items()):
            if waiter.deadline <= now and self._waiters.get(client) is waiter:
                self._stop_waiting(client)
                missing = [key for key in waiter.keys[waiter.position :] if key not in self._values]
                self._reply(client, StoreReply.TIMEOUT, missing)

    def _join(self, connection: socket.socket, handshake: HandshakeResult) -> None:
        client = _Client(connection, Opener(handshake.receive_key), Sealer(handshake.send_key))
        with self._clients_changed:
            self._clients.add(client)
            self._connected_count += 1
            self._clients_changed.notify_all()
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._serve(client))

    def _drop(self, client: _Client) -> None:
        if client in self._clients:
            with self._clients_changed:
                self._clients.remove(client)
                self._clients_changed.notify_all()
            self._stop_waiting(client)
            self._selector.unregister(client.connection)
            client.connection.close()
            if client.on_disconnect is not None and not self._thread.stopping:
                key, value = client.on_disconnect
                self._values.setdefault(key, value)
                self._key_was_set(key)

    def _serve(self, client: _Client) -> None:
        """Reads requests and sends unsent replies; a client that violates the protocol is dropped."""
        try:
            self._flush(client)
            data = client.connection.recv(RECEIVE_BYTES)
            if not data:
                self._drop(client)
                return
            for payload in client.opener.feed(data):
                if client not in self._clients:
                    return
                if client in self._waiters:
                    raise ValueError("a request before the reply to the one before")
                self._handle(client, payload)
        except BlockingIOError:
            return
        except (OSError, HandshakeError, ValueError):
            self._drop(client)
        except Exception:  # one client's error must not end the store of all
            logging.getLogger("horo").exception("a request to the job's store failed; its client is disconnected")
            self._drop(client)

    def _handle(self, client: _Client, payload: bytes) -> None:
        request, fields = read_request(payload)
        if request is StoreRequest.SET:
            key, value = fields
            self._values[key] = value
            self._reply(client, StoreReply.OK, [])
            self._key_was_set(key)
        elif request is StoreRequest.ADD:
            key, amount = fields
            try:
                total = int(self._values.get(key, b"0")) + INT64.unpack(amount)[0]
            except ValueError:
                self._reply(client, StoreReply.REFUSED, [b"the key holds no integer"])
                return
            self._values[key] = b"%d" % total
            self._reply(client, StoreReply.OK, [self._values[key]])
            self._key_was_set(key)
        elif request is StoreRequest.DELETE:
            for key in fields:
                self._values.pop(key, None)
            self._reply(client, StoreReply.OK, [])
        elif request is StoreRequest.ON_DISCONNECT:
            client.on_disconnect = (fields[0], fields[1]) if fields else None
            self._reply(client, StoreReply.OK, [])
        else:
            timeout_ms, unless, *keys = fields
            timeout_s = min(INT64.unpack(timeout_ms)[0] / 1000, WAIT_S_MAX)
            waiter = _Waiter(keys, unless, time.monotonic() + timeout_s)
            self._waiters[client] = waiter
            self._waiting.setdefault(unless, set()).add(client)
            self._try_answer(client, waiter)

    def _key_was_set(self, key: bytes) -> None:
        for client in list(self._waiting.get(key, ())):
            # A reply can detect that another client is gone: its ``on_disconnect`` is then set and may answer the rest.
            waiter = self._waiters.get(client)
            if waiter is not None:
                self._try_answer(client, waiter)

    def _try_answer(self, client: _Client, waiter: _Waiter) -> None:
        """Answers a waiting client if all its keys are there, else records the first key that is missing."""
        if waiter.unless in self._values:
            self._stop_waiting(client)
            self._reply(client, StoreReply.ABANDONED, [self._values[waiter.unless]])
            return
        self._unwatch(client, waiter)
        while waiter.position < len(waiter.keys) and waiter.keys[waiter.position] in self._values:
            waiter.position += 1
        if waiter.position < len(waiter.keys):
            self._waiting.setdefault(waiter.keys[waiter.position], set()).add(client)
            return
        self._stop_waiting(client)
        self._reply_values(client, waiter.keys)

    def _reply_values(self, client: _Client, keys: Sequence[bytes]) -> None:
        # A key seen earlier may have been deleted meanwhile: an error of the clients, which is reported.
        values = [self._values.get(key) for key in keys]
        found = [value for value in values if value is not None]
        if len(found) < len(values):
            self._reply(client, StoreReply.REFUSED, [b"a key was deleted while others were awaited with it"])
        elif sum(map(len, found)) + 4 * len(found) > PAYLOAD_BYTES_MAX - 64:
            self._reply(client, StoreReply.REFUSED, [b"the values together are too long for one reply"])
        else:
            self._reply(client, StoreReply.OK, found)

    def _unwatch(self, client: _Client, waiter: _Waiter) -> None:
        if waiter.position < len(waiter.keys):
            self._discard(waiter.keys[waiter.position], client)

    def _stop_waiting(self, client: _Client) -> None:
        waiter = self._waiters.pop(client, None)
        if waiter is not None:
            self._unwatch(client, waiter)
            self._discard(waiter.unless, client)

    def _discard(self, key: bytes, client: _Client) -> None:
        clients = self._waiting.get(key)
        if clients is not None:
            clients.discard(client)
            if not clients:
                del self._waiting[key]

    def _reply(self, client: _Client, status: StoreReply, fields: Sequence[bytes]) -> None:
        frame = client.sealer.seal(bytes([status]) + pack_fields(fields))
        self._reply_bytes += len(frame)
        client.output += frame
        try:
            self._flush(client)
        except OSError:
            self._drop(client)

    def _flush(self, client: _Client) -> None:
        while client.output:
            try:
                sent = client.connection.send(client.output)
            except BlockingIOError:
                break
            del client.output[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.output else 0)
        key = self._selector.get_key(client.connection)
        if key.events != events:
            self._selector.modify(client.connection, events, key.data)


def _admit_store_client(connection: socket.socket, handshake: HandshakeResult) -> None:
    if handshake.claim.purpose is not Purpose.STORE:
        raise HandshakeError(f"it wants a {handshake.claim.purpose.name.lower()} link, this is the store")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
