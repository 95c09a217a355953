"""A process between two ranks, without the secret: it passes the handshake on byte for byte to keep the connection."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from jobs import wait_until

from horo.bootstrap.auth.handshake import Acceptor, Claim, HandshakeError, Purpose, authenticate
from horo.bootstrap.net.addresses import Endpoint, bind_all
from horo.bootstrap.net.dial import dial
from horo.bootstrap.net.listener import ListenerThread
from horo.errors import PeerLostError

SECRET = bytes(range(32))
CLAIM = Claim(Purpose.DATA, 1, 0, 1)


class Relay:
    """Listens at an address of its own and passes what comes on to ``target``, both ways."""

    def __init__(self, target: Endpoint) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint(*self._listener.getsockname())
        self.passed = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.passed += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def refusals() -> list[str]:
    return []


@pytest.fixture
def admitted() -> list[socket.socket]:
    return []


@pytest.fixture
def endpoint(refusals: list[str], admitted: list[socket.socket]) -> Iterator[Endpoint]:
    listeners = bind_all(["127.0.0.1"])
    address = Endpoint(*listeners[0].getsockname())
    thread = ListenerThread(
        listeners, SECRET, admit=lambda *_: None, on_peer=lambda peer, _: admitted.append(peer),
        on_refused=refusals.append
    )  # fmt: skip
    yield address
    thread.close()
    for connection in admitted:
        connection.close()


def test_a_relayed_handshake_is_refused(endpoint: Endpoint, refusals: list[str], admitted: list[socket.socket]) -> None:
    relay = Relay(endpoint)
    try:
        with pytest.raises(PeerLostError, match="closed the connection during the handshake"):
            dial([relay.endpoint], SECRET, CLAIM, 1)
    finally:
        relay.close()
    wait_until(lambda: bool(refusals), "it is refused")
    assert f"connected to {relay.endpoint} and has come out at {endpoint}" in refusals[0]
    assert relay.passed > 0
    assert not admitted
    connection, _ = dial([endpoint], SECRET, CLAIM, 5)
    connection.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_address_that_was_dialed_is_proven(address: str) -> None:
    """Whoever writes the acceptor's own address into its HELLO has to know the secret."""
    try:
        server = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError:
        pytest.skip("there is no IPv6 on this machine")
    elsewhere = Acceptor(SECRET, ("10.1.2.3", 4711))
    honest = Acceptor(SECRET, server.getsockname())

    def forge(connection: socket.socket) -> None:
        hello = bytearray(connection.recv(elsewhere.missing_bytes, socket.MSG_WAITALL))
        assert honest.feed(bytes(hello))
        hello[24:42] = bytes(10) + b"\xff\xff" + bytes([10, 1, 2, 3]) + (4711).to_bytes(2, "big")
        connection.sendall(elsewhere.feed(bytes(hello)))

    with server, socket.create_connection(server.getsockname()[:2]) as dialer:
        near, _ = server.accept()
        with near:
            thread = threading.Thread(target=forge, args=(near,))
            thread.start()
            with pytest.raises(HandshakeError, match="does not know the job's secret"):
                authenticate(dialer, SECRET, CLAIM, _deadline())
            thread.join()


def _deadline() -> float:
    return time.monotonic() + 10
