"""The job's store: a small authenticated key-value store through which the ranks exchange data while they start.

The launcher runs one ``StoreServer``; every rank is a ``StoreClient``. Values are bytes and never unpickled. The server
waits on behalf of its clients, so clients do not poll. One thread serves all of them.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from horo._bootstrap.auth.frames import PAYLOAD_BYTES_MAX, Opener, Sealer, pack_fields, unpack_fields
from horo._bootstrap.auth.handshake import Claim, HandshakeError, Purpose, Session, check_secret
from horo._bootstrap.net.addresses import Endpoint, bind_all
from horo._bootstrap.net.dial import dial
from horo._bootstrap.net.listener import HALF_OPEN_MAX, HANDSHAKE_TIMEOUT_S, Listener
from horo._bootstrap.net.selector_thread import SelectorThread
from horo._bootstrap.store.protocol import StoreAbandonedError, StoreTimeoutError
from horo.errors import HoroError, PeerLostError, UsageError

__all__ = ["KEY_BYTES_MAX", "VALUE_BYTES_MAX", "StoreClient", "StoreServer"]

KEY_BYTES_MAX = 1024
VALUE_BYTES_MAX = 8 << 20
_CLIENT_GRACE_S = 10.0
_WAIT_S_MAX = 1e6
_RECEIVE_BYTES = 1 << 16
_INT64 = struct.Struct("!q")


class _Request(IntEnum):
    SET = 1
    GET = 2
    ADD = 3
    DELETE = 4
    ON_DISCONNECT = 5


class _Reply(IntEnum):
    OK = 0
    TIMEOUT = 1
    ABANDONED = 2
    REFUSED = 3


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
        secret: the job's, at least 16 bytes.
        port: 0 lets the system choose.
        on_refused: gets one sentence for a refused connection, at most once a minute per address; called on the
            server's thread. None: refused connections are not reported.
        half_open_max: most connections whose handshake is not finished.
        handshake_timeout_s: longest time for a handshake.

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
    ) -> None:
        check_secret(secret)
        listeners = bind_all(addresses, port)
        self.endpoints: list[Endpoint] = [Endpoint(*listener.getsockname()[:2]) for listener in listeners]
        self._values: dict[bytes, bytes] = {}
        self._clients: set[_Client] = set()
        self._waiters: dict[_Client, _Waiter] = {}
        self._waiting: dict[bytes, set[_Client]] = {}
        self._connected_count = 0
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
        """How many clients have connected so far."""
        return self._connected_count

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
            if waiter.deadline <= now:
                self._stop_waiting(client)
                missing = [key for key in waiter.keys[waiter.position :] if key not in self._values]
                self._reply(client, _Reply.TIMEOUT, missing)

    def _join(self, connection: socket.socket, session: Session) -> None:
        client = _Client(connection, Opener(session.receive_key), Sealer(session.send_key))
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
            data = client.connection.recv(_RECEIVE_BYTES)
            if not data:
                self._drop(client)
                return
            for payload in client.opener.feed(data):
                if client in self._waiters:
                    raise ValueError("a request before the reply to the one before")
                self._handle(client, payload)
        except BlockingIOError:
            return
        except (OSError, HandshakeError, ValueError, struct.error):
            self._drop(client)

    def _handle(self, client: _Client, payload: bytes) -> None:
        request = _Request(payload[0] if payload else 0)
        fields = unpack_fields(payload[1:])
        if request is _Request.SET:
            key, value = fields
            self._values[key] = value
            self._reply(client, _Reply.OK, [])
            self._key_was_set(key)
        elif request is _Request.ADD:
            key, amount = fields
            try:
                total = int(self._values.get(key, b"0")) + _INT64.unpack(amount)[0]
            except ValueError:
                self._reply(client, _Reply.REFUSED, [b"the key holds no integer"])
                return
            self._values[key] = b"%d" % total
            self._reply(client, _Reply.OK, [self._values[key]])
            self._key_was_set(key)
        elif request is _Request.DELETE:
            for key in fields:
                self._values.pop(key, None)
            self._reply(client, _Reply.OK, [])
        elif request is _Request.ON_DISCONNECT:
            client.on_disconnect = (fields[0], fields[1]) if fields else None
            self._reply(client, _Reply.OK, [])
        else:
            timeout_ms, unless, *keys = fields
            timeout_s = min(_INT64.unpack(timeout_ms)[0] / 1000, _WAIT_S_MAX)
            waiter = _Waiter(keys, unless, time.monotonic() + timeout_s)
            self._waiters[client] = waiter
            self._waiting.setdefault(unless, set()).add(client)
            self._try_answer(client, waiter)

    def _key_was_set(self, key: bytes) -> None:
        for client in list(self._waiting.get(key, ())):
            self._try_answer(client, self._waiters[client])

    def _try_answer(self, client: _Client, waiter: _Waiter) -> None:
        """Answers a waiting client if all its keys are there, else records the first key that is missing."""
        if waiter.unless in self._values:
            self._stop_waiting(client)
            self._reply(client, _Reply.ABANDONED, [self._values[waiter.unless]])
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
            self._reply(client, _Reply.REFUSED, [b"a key was deleted while others were awaited with it"])
        elif sum(map(len, found)) + 4 * len(found) > PAYLOAD_BYTES_MAX - 64:
            self._reply(client, _Reply.REFUSED, [b"the values together are too long for one reply"])
        else:
            self._reply(client, _Reply.OK, found)

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

    def _reply(self, client: _Client, status: _Reply, fields: Sequence[bytes]) -> None:
        client.output += client.sealer.seal(bytes([status]) + pack_fields(fields))
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


def _admit_store_client(connection: socket.socket, session: Session) -> None:
    if session.claim.purpose is not Purpose.STORE:
        raise HandshakeError(f"it wants a {session.claim.purpose.name.lower()} link, this is the store")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class StoreClient:
    """A connection to a ``StoreServer``; one request at a time, so one thread's wait delays the others' requests.

    Args:
        address: numeric address of the server.
        port: its port.
        secret: the job's.
        timeout_s: how long to try to connect.
        alternatives: further endpoints of the same server; the first that answers is used.
        hosted_by: the process that runs the server, for messages.

    Raises:
        PeerLostError: no endpoint answered and knew the secret in time.
    """

    def __init__(
        self,
        address: str,
        port: int,
        secret: bytes,
        timeout_s: float,
        alternatives: Sequence[Endpoint] = (),
        *,
        hosted_by: str = "the launcher",
    ) -> None:
        check_secret(secret)
        endpoints = list(dict.fromkeys([Endpoint(address, port), *alternatives]))
        try:
            self._connection, session = dial(endpoints, secret, Claim(Purpose.STORE), timeout_s)
        except PeerLostError as error:
            raise PeerLostError(f"the job's store cannot be reached: {error}") from error
        self._endpoint = Endpoint(*self._connection.getpeername()[:2])
        self._sealer = Sealer(session.send_key)
        self._opener = Opener(session.receive_key)
        self._lock = threading.Lock()
        self._has_on_disconnect = False
        self._kept_by = hosted_by

    @property
    def local_address(self) -> str:
        """The numeric address of this machine from which the store is reached."""
        return str(self._connection.getsockname()[0])

    def set(self, key: str, value: bytes) -> None:
        """As ``Store.set``; at most ``VALUE_BYTES_MAX`` bytes."""
        if len(value) > VALUE_BYTES_MAX:
            raise UsageError(f"the value of {key!r} has {len(value)} bytes, at most {VALUE_BYTES_MAX} are allowed")
        self._call(_Request.SET, [_encode_key(key), value])

    def get_many(self, keys: Sequence[str], timeout_s: float, unless: str | None = None) -> list[bytes]:
        """As ``Store.get_many``; the server waits, the client does not poll."""
        timeout_s = min(max(timeout_s, 0.0), _WAIT_S_MAX)
        timeout_ms = _INT64.pack(int(timeout_s * 1000))
        encoded = [_encode_key(key) for key in keys]
        abandon = _encode_key(unless) if unless is not None else b""
        return self._call(_Request.GET, [timeout_ms, abandon, *encoded], timeout_s)

    def get(self, key: str, timeout_s: float, unless: str | None = None) -> bytes:
        """As ``Store.get``."""
        return self.get_many([key], timeout_s, unless)[0]

    def add(self, key: str, amount: int) -> int:
        """As ``Store.add``."""
        return int(self._call(_Request.ADD, [_encode_key(key), _INT64.pack(amount)])[0])

    def delete(self, keys: Sequence[str]) -> None:
        """As ``Store.delete``."""
        self._call(_Request.DELETE, [_encode_key(key) for key in keys])

    def set_on_disconnect(self, key: str, value: bytes | None) -> None:
        """As ``Store.set_on_disconnect``."""
        self._call(_Request.ON_DISCONNECT, [] if value is None else [_encode_key(key), value])
        self._has_on_disconnect = value is not None

    def close(self) -> None:
        """Closes the connection; idempotent."""
        if self._has_on_disconnect and self._connection.fileno() >= 0:
            with contextlib.suppress(HoroError):
                self.set_on_disconnect("", None)
        self._connection.close()

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _call(self, request: _Request, fields: Sequence[bytes], timeout_s: float = 0.0) -> list[bytes]:
        payload = bytes([request]) + pack_fields(fields)
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise UsageError(f"a request of {len(payload)} bytes to the store, at most {PAYLOAD_BYTES_MAX} are allowed")
        with self._lock:
            reply = self._exchange(payload, timeout_s)
        status, values = _Reply(reply[0]), unpack_fields(reply[1:])
        if status is _Reply.TIMEOUT:
            raise StoreTimeoutError([value.decode() for value in values])
        if status is _Reply.ABANDONED:
            raise StoreAbandonedError(values[0])
        if status is _Reply.REFUSED:
            raise UsageError(f"the store at {self._endpoint} refused a request: {values[0].decode()}")
        return values

    def _exchange(self, payload: bytes, timeout_s: float) -> bytes:
        try:
            self._connection.settimeout(timeout_s + _CLIENT_GRACE_S)
            self._connection.sendall(self._sealer.seal(payload))
            while True:
                data = self._connection.recv(_RECEIVE_BYTES)
                if not data:
                    raise PeerLostError(f"the job's store at {self._endpoint} is gone: did {self._kept_by} end?")
                replies = self._opener.feed(data)
                if replies:
                    return replies[0]
        except (OSError, HandshakeError) as error:
            # The stream may be in the middle of a frame: never use it again.
            self._connection.close()
            raise PeerLostError(
                f"the job's store at {self._endpoint} is gone: {error}; did {self._kept_by} end?"
            ) from error


def _encode_key(key: str) -> bytes:
    encoded = key.encode()
    if not 0 < len(encoded) <= KEY_BYTES_MAX:
        raise UsageError(f"a key of the store has 1 to {KEY_BYTES_MAX} bytes, {key[:64]!r} has {len(encoded)}")
    return encoded
