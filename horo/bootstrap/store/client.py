"""A rank's connection to the job's store."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from horo.bootstrap.auth.frames import PAYLOAD_BYTES_MAX, Opener, Sealer, pack_fields, unpack_fields
from horo.bootstrap.auth.handshake import Claim, HandshakeError, Purpose, check_secret
from horo.bootstrap.net.addresses import CHECK_HOSTS, Endpoint
from horo.bootstrap.net.dial import dial
from horo.bootstrap.net.interfaces import is_loopback
from horo.bootstrap.store.frames import (
    INT64,
    RECEIVE_BYTES,
    VALUE_BYTES_MAX,
    WAIT_S_MAX,
    StoreReply,
    StoreRequest,
    encode_key,
)
from horo.bootstrap.store.protocol import StoreAbandonedError, StoreTimeoutError
from horo.errors import HoroError, PeerLostError, ResourceError, UsageError

__all__ = ["StoreClient"]


class StoreClient:
    """A connection to a ``StoreServer``; one request at a time, so one thread's wait delays the others' requests.

    Args:
        address: numeric address of the server.
        port: port of the server.
        secret: the job's secret.
        timeout_s: how long to try to connect.
        alternatives: further endpoints of the same server; the first that answers is used.
        served_by: the process that runs the server, for messages.
        answer_s: longest wait for an answer, in addition to the time for which the server itself
            may wait; ``timeout_s`` by default.

    Raises:
        PeerLostError: no endpoint answered and authenticated itself in time.
        ResourceError: this process can open no socket.
    """

    def __init__(
        self,
        address: str,
        port: int,
        secret: bytes,
        timeout_s: float,
        alternatives: Sequence[Endpoint] = (),
        *,
        served_by: str = "the launcher",
        answer_s: float | None = None,
    ) -> None:
        check_secret(secret)
        endpoints = list(dict.fromkeys([Endpoint(address, port), *alternatives]))
        try:
            self._connection, handshake = dial(endpoints, secret, Claim(Purpose.STORE), timeout_s)
        except PeerLostError as error:
            hint = "" if any(is_loopback(endpoint.address) for endpoint in endpoints) else f". {CHECK_HOSTS}"
            raise PeerLostError(f"the job's store cannot be reached: {error}{hint}") from error
        except OSError as error:  # of this process: too many open files
            raise ResourceError(f"the job's store could not be dialed: {error}") from error
        self._endpoint = Endpoint(*self._connection.getpeername()[:2])
        self._sealer = Sealer(handshake.send_key)
        self._opener = Opener(handshake.receive_key)
        self._lock = threading.Lock()
        self._has_on_disconnect = False
        self._served_by = served_by
        self._answer_s = timeout_s if answer_s is None else answer_s

    @property
    def local_address(self) -> str:
        """The numeric address of this machine from which the store is reached."""
        return str(self._connection.getsockname()[0])

    def set(self, key: str, value: bytes) -> None:
        """As ``Store.set``; at most ``VALUE_BYTES_MAX`` bytes."""
        if len(value) > VALUE_BYTES_MAX:
            raise UsageError(f"the value of {key!r} has {len(value)} bytes, at most {VALUE_BYTES_MAX} are allowed")
        self._call(StoreRequest.SET, [encode_key(key), value])

    def get_many(self, keys: Sequence[str], timeout_s: float, unless: str | None = None) -> list[bytes]:
        """As ``Store.get_many``; the server waits, the client does not poll."""
        timeout_s = min(max(timeout_s, 0.0), WAIT_S_MAX)
        timeout_ms = INT64.pack(int(timeout_s * 1000))
        encoded = [encode_key(key) for key in keys]
        abandon = encode_key(unless) if unless is not None else b""
        return self._call(StoreRequest.GET, [timeout_ms, abandon, *encoded], timeout_s)

    def get(self, key: str, timeout_s: float, unless: str | None = None) -> bytes:
        """As ``Store.get``."""
        return self.get_many([key], timeout_s, unless)[0]

    def post(self, key: str) -> None:
        """Sends a request for the value of a key, which ``poll`` returns; until then, this connection takes no other.

        Raises:
            PeerLostError: the store is gone.
        """
        payload = bytes([StoreRequest.GET]) + pack_fields([INT64.pack(int(WAIT_S_MAX * 1000)), b"", encode_key(key)])
        try:
            self._connection.settimeout(self._answer_s)
            self._connection.sendall(self._sealer.seal(payload))
        except OSError as error:
            self._connection.close()
            raise PeerLostError(f"the job's store at {self._endpoint} is gone: {error}") from error

    def poll(self) -> bytes | None:
        """The value that ``post`` has asked for; None: it is not there. Does not block.

        Raises:
            PeerLostError: the store is gone.
        """
        try:
            self._connection.setblocking(False)
            data = self._connection.recv(RECEIVE_BYTES)
            replies = self._opener.feed(data)
        except BlockingIOError:
            return None
        except (OSError, HandshakeError) as error:
            self._connection.close()
            raise PeerLostError(f"the job's store at {self._endpoint} is gone: {error}") from error
        if not data:
            raise PeerLostError(f"the job's store at {self._endpoint} is gone: did {self._served_by} end?")
        return unpack_fields(replies[0][1:])[0] if replies and replies[0][0] == StoreReply.OK else None

    def add(self, key: str, amount: int) -> int:
        """As ``Store.add``."""
        return int(self._call(StoreRequest.ADD, [encode_key(key), INT64.pack(amount)])[0])

    def delete(self, keys: Sequence[str]) -> None:
        """As ``Store.delete``."""
        self._call(StoreRequest.DELETE, [encode_key(key) for key in keys])

    def set_on_disconnect(self, key: str, value: bytes | None) -> None:
        """As ``Store.set_on_disconnect``."""
        self._call(StoreRequest.ON_DISCONNECT, [] if value is None else [encode_key(key), value])
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

    def _call(self, request: StoreRequest, fields: Sequence[bytes], timeout_s: float = 0.0) -> list[bytes]:
        payload = bytes([request]) + pack_fields(fields)
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise UsageError(f"a request of {len(payload)} bytes to the store, at most {PAYLOAD_BYTES_MAX} are allowed")
        with self._lock:
            reply = self._exchange(payload, timeout_s)
        status, values = StoreReply(reply[0]), unpack_fields(reply[1:])
        if status is StoreReply.TIMEOUT:
            raise StoreTimeoutError([value.decode() for value in values])
        if status is StoreReply.ABANDONED:
            raise StoreAbandonedError(values[0])
        if status is StoreReply.REFUSED:
            raise UsageError(f"the store at {self._endpoint} refused a request: {values[0].decode()}")
        return values

    def _exchange(self, payload: bytes, timeout_s: float) -> bytes:
        try:
            self._connection.settimeout(timeout_s + self._answer_s)
            self._connection.sendall(self._sealer.seal(payload))
            while data := self._connection.recv(RECEIVE_BYTES):
                replies = self._opener.feed(data)
                if replies:
                    return replies[0]
        except (OSError, HandshakeError) as error:
            # The stream may be in the middle of a frame: never use it again.
            self._connection.close()
            if isinstance(error, TimeoutError):
                raise PeerLostError(
                    f"the job's store at {self._endpoint} has not answered for {timeout_s + self._answer_s:g} s: "
                    f"{self._served_by} stands still or is overloaded, or the network does not let its answers through"
                ) from error
            raise PeerLostError(
                f"the job's store at {self._endpoint} is gone: {error}; did {self._served_by} end?"
            ) from error
        raise PeerLostError(f"the job's store at {self._endpoint} is gone: did {self._served_by} end?")
