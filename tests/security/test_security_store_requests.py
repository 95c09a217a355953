"""A member of the job that sends nonsense to the store is disconnected; the store serves the others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from horo.bootstrap.auth.frames import pack_fields
from horo.bootstrap.store.client import StoreClient
from horo.bootstrap.store.frames import INT64, KEY_BYTES_MAX, StoreRequest
from horo.bootstrap.store.protocol import StoreAbandonedError
from horo.bootstrap.store.server import StoreServer, _Client
from horo.errors import PeerLostError

SECRET = bytes(range(32))
NOW = INT64.pack(0)


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    with StoreServer(["127.0.0.1"], SECRET) as running:
        yield running


def client_of(server: StoreServer) -> StoreClient:
    return StoreClient(*server.endpoints[0], SECRET, 10)


def message(request: int, *fields: bytes) -> bytes:
    return bytes([request]) + pack_fields(fields)


def send(server: StoreServer, *payloads: bytes) -> bytes:
    """What the store answers to these payloads before it closes the connection."""
    with client_of(server) as client:
        connection = client._connection
        connection.settimeout(30)
        connection.sendall(b"".join(client._sealer.seal(payload) for payload in payloads))
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while data := connection.recv(1 << 16):
                answer += data
        except ConnectionResetError:
            pass  # what it had not read when it closed the connection
        return answer


def check_serves(server: StoreServer) -> None:
    with client_of(server) as client:
        client.set("checked", b"value")
        assert client.get_many(["checked"], 10, unless="never") == [b"value"]
        client.delete(["checked"])


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x00",
        b"\xff" + pack_fields([]),
        bytes([StoreRequest.SET]),
        message(StoreRequest.SET),
        message(StoreRequest.SET, b"key"),
        message(StoreRequest.SET, b"key", b"value", b"more"),
        message(StoreRequest.SET, b"", b"value"),
        message(StoreRequest.SET, b"k" * (KEY_BYTES_MAX + 1), b"value"),
        message(StoreRequest.GET),
        message(StoreRequest.GET, NOW),
        message(StoreRequest.GET, b"", b"", b"key"),
        message(StoreRequest.GET, NOW, b"", b""),
        message(StoreRequest.ADD, b"key"),
        message(StoreRequest.ADD, b"key", b"1"),
        message(StoreRequest.ADD, b"", NOW),
        message(StoreRequest.DELETE, b""),
        message(StoreRequest.ON_DISCONNECT, b"key"),
        message(StoreRequest.ON_DISCONNECT, b"", b"value"),
        message(StoreRequest.ON_DISCONNECT, b"key", b"value", b"more"),
    ],
)
def test_a_malformed_request_ends_its_connection_alone(server: StoreServer, payload: bytes) -> None:
    assert send(server, payload) == b""
    check_serves(server)


_FIELDS = st.lists(st.one_of(st.binary(max_size=12), st.just(NOW), st.sampled_from([b"a", b"b"])), max_size=4)
_PAYLOADS = st.one_of(
    st.binary(max_size=40),
    st.builds(lambda request, fields: message(request, *fields), st.integers(0, 7), _FIELDS),
    st.builds(lambda request, fields, cut: message(request, *fields)[:-cut], st.integers(1, 5), _FIELDS, st.just(1)),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_PAYLOADS, min_size=1, max_size=4))
def test_no_sequence_of_requests_stops_the_store(server: StoreServer, payloads: list[bytes]) -> None:
    send(server, *payloads)
    check_serves(server)


def test_members_that_vanish_while_they_wait_for_each_other_do_not_stop_the_store(server: StoreServer) -> None:
    """Each leaves the value that the others wait for, and the store finds out while it answers them."""
    gone = [client_of(server) for _ in range(4)]
    waiting = client_of(server)
    ends: list[BaseException] = []

    def wait(client: StoreClient) -> None:
        try:
            client.get("never", 30, unless="failed")
        except (StoreAbandonedError, PeerLostError) as error:
            ends.append(error)

    for client in gone:
        client.set_on_disconnect("failed", b"gone")
    real = server._flush

    def flush(client: _Client) -> None:
        if client.on_disconnect is not None and b"failed" in server._values:
            raise BrokenPipeError
        real(client)

    server._flush = flush
    threads = [threading.Thread(target=wait, args=(client,)) for client in [*gone, waiting]]
    try:
        for thread in threads:
            thread.start()
        with client_of(server) as last:
            while len(server._waiters) < len(threads):
                last.add("turns", 1)
            last.set("failed", b"first")
            for thread in threads:
                thread.join(30)
            assert last.get("failed", 10) == b"first"
            last.delete(["failed"])
    finally:
        del server._flush
        for client in [*gone, waiting]:
            client.close()
    assert sorted(type(end).__name__ for end in ends) == ["PeerLostError"] * 4 + ["StoreAbandonedError"]
    check_serves(server)
