"""The store: its promises to clients, and that connections without the secret cannot change it."""

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import open_descriptors, wait_until

from horo.bootstrap.auth.frames import Opener, Sealer, pack_fields, unpack_fields
from horo.bootstrap.auth.handshake import Acceptor, Claim, HandshakeError, Purpose, authenticate
from horo.bootstrap.net.addresses import Endpoint, parse_endpoints
from horo.bootstrap.net.dial import dial
from horo.bootstrap.net.listener import RefusalLog
from horo.bootstrap.store.client import StoreClient
from horo.bootstrap.store.protocol import StoreAbandonedError, StoreTimeoutError, prefixed
from horo.bootstrap.store.server import StoreServer
from horo.errors import HorovodInternalError, PeerLostError, ResourceError, UsageError

SECRET = bytes(range(32))


@pytest.fixture
def refusals() -> list[str]:
    return []


@pytest.fixture
def server(refusals: list[str]) -> Iterator[StoreServer]:
    with StoreServer(["127.0.0.1"], SECRET, on_refused=refusals.append, handshake_timeout_s=1.0) as running:
        yield running


def client_of(server: StoreServer, secret: bytes = SECRET, timeout_s: float = 5.0) -> StoreClient:
    return StoreClient(*server.endpoints[0], secret, timeout_s)


def raw(server: StoreServer) -> socket.socket:
    connection = socket.create_connection(server.endpoints[0])
    connection.settimeout(10)
    return connection


def test_add_to_something_else_is_refused_and_changes_nothing(server: StoreServer) -> None:
    with client_of(server) as client:
        client.set("text", b"abc")
        with pytest.raises(UsageError, match="holds no integer"):
            client.add("text", 1)
        assert client.get("text", 0) == b"abc"
        assert [client.add("n", 400), client.add("n", -1), client.get("n", 0)] == [400, 399, b"399"]


def test_large_values_pass_and_too_large_ones_are_refused_here(server: StoreServer) -> None:
    with client_of(server) as client:
        value = os.urandom(1 << 20) * 8
        client.set("big", value)
        assert client.get("big", 5) == value
        with pytest.raises(UsageError, match="8388609 bytes"):
            client.set("bigger", value + b"x")
        with pytest.raises(UsageError, match="1 to 1024"):
            client.set("k" * 1025, b"")
        for index in range(9):
            client.set(f"v{index}", value)
        with pytest.raises(UsageError, match="too long for one reply"):
            client.get_many([f"v{index}" for index in range(9)], 5)
        assert client.get("big", 5) == value


def test_client_that_vanishes_while_waiting_disturbs_nobody(server: StoreServer) -> None:
    waiting, other = client_of(server), client_of(server)

    def wait_in_vain() -> None:
        with pytest.raises(PeerLostError):
            waiting.get("a", 10)

    thread = threading.Thread(target=wait_in_vain)
    thread.start()
    other.set("unrelated", b"")
    waiting._connection.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    other.set("a", b"1")
    assert other.get("a", 0) == b"1"
    wait_until(lambda: len(server._clients) == 1, "the others have gone")
    assert not server._waiters
    assert not server._waiting
    other.close()


def test_value_of_set_on_disconnect_is_set_for_a_lost_client_and_not_for_one_that_closes(server: StoreServer) -> None:
    reader, closing, lost = client_of(server), client_of(server), client_of(server)
    prefixed(closing, "p/").set_on_disconnect("failed", b"closed")
    prefixed(lost, "p/").set_on_disconnect("failed", b"lost")
    closing.close()
    lost._connection.close()
    with pytest.raises(StoreAbandonedError) as caught:
        reader.get("never", 10, unless="p/failed")
    assert caught.value.value == b"lost"
    late = client_of(server)
    late.set_on_disconnect("p/failed", b"too late")
    late._connection.close()
    wait_until(lambda: len(server._clients) == 1, "the others have gone")
    assert reader.get("p/failed", 0) == b"lost"
    reader.close()


def test_server_that_closes_is_an_error_that_says_so() -> None:
    server = StoreServer(["127.0.0.1"], SECRET)
    client, served = client_of(server), StoreClient(*server.endpoints[0], SECRET, 10, served_by="rank 0")
    server.close()
    server.close()
    with pytest.raises(PeerLostError, match="did rank 0 end"):
        served.set("key", b"")
    with pytest.raises(HorovodInternalError, match=r"store at 127\.0\.0\.1:\d+ is gone"):
        client.get("a", 5)
    with pytest.raises(PeerLostError):
        client.get("a", 5)
    with pytest.raises(PeerLostError, match="Connection refused"):
        client_of(server, timeout_s=0.05)


def test_an_answer_is_awaited_and_its_lack_is_named(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with client_of(server, timeout_s=300) as patient, client_of(server, timeout_s=0.1) as client:
        with pytest.raises(StoreTimeoutError):
            patient.get("a", 0.01)
        assert patient._connection.gettimeout() == pytest.approx(300.01)
        monkeypatch.setattr(server, "_reply", lambda client, status, fields: None)
        with pytest.raises(
            PeerLostError, match=r"store at 127\.0\.0\.1:\d+ has not answered for 0\.1 s: the launcher "
        ):
            client.set("a", b"")


def test_nothing_is_left_open_after_close() -> None:
    before = open_descriptors(), threading.active_count()
    for _ in range(5):
        with StoreServer(["127.0.0.1"], SECRET) as server, client_of(server) as client, raw(server):
            client.set("a", b"")
    assert open_descriptors() <= before[0]
    assert threading.active_count() <= before[1]


def test_several_addresses_share_one_port_and_one_that_cannot_be_bound_is_named() -> None:
    with StoreServer(["127.0.0.1", "127.0.0.2", "::1"], SECRET) as server:
        assert [endpoint.address for endpoint in server.endpoints] == ["127.0.0.1", "127.0.0.2", "::1"]
        assert len({endpoint.port for endpoint in server.endpoints}) == 1
        with StoreClient("::1", server.endpoints[2].port, SECRET, 5) as client:
            client.set("a", b"1")
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))  # and not listening: nobody else gets the port
            with StoreClient(*silent.getsockname(), SECRET, 5, alternatives=server.endpoints) as client:
                assert client.get("a", 0) == b"1"
    with pytest.raises(ResourceError, match=r"198\.51\.100\.77"):
        StoreServer(["198.51.100.77"], SECRET)
    with pytest.raises(UsageError, match="localhost"):
        StoreServer(["localhost"], SECRET)
    with (
        StoreServer(["127.0.0.1"], SECRET) as server,
        pytest.raises(ResourceError, match=f"127.0.0.1:{server.endpoints[0].port}: Address already in use"),
    ):
        StoreServer(["127.0.0.1"], SECRET, port=server.endpoints[0].port)
    with pytest.raises(UsageError, match="3 bytes"):
        StoreServer(["127.0.0.1"], b"abc")


def test_wrong_secret_is_refused_on_both_sides_and_logged(server: StoreServer, refusals: list[str]) -> None:
    with pytest.raises(PeerLostError, match="does not know the job's secret"):
        client_of(server, bytes(32), timeout_s=0.05)
    wait_until(lambda: bool(refusals), "it is refused")
    with client_of(server) as client:
        client.set("a", b"")
    assert refusals == ["refused a connection from 127.0.0.1: it does not know the job's secret"]


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_dialer_that_ends_during_the_handshake_is_not_refused(
    server: StoreServer, refusals: list[str], is_answered: bool
) -> None:
    with raw(server) as connection:
        address, port = connection.getpeername()
        reached = bytes(10) + b"\xff\xff" + socket.inet_aton(address) + port.to_bytes(2, "big")
        connection.sendall(b"HORO\x03\x01\0\0" + bytes(16) + reached + bytes(32))
        connection.recv(72, socket.MSG_WAITALL if is_answered else socket.MSG_PEEK)
    with raw(server) as connection:  # the next line is about this one
        connection.sendall(b"GET ")
        assert connection.recv(1) == b""
    wait_until(lambda: bool(refusals), "it is refused")
    assert refusals == ["refused a connection from 127.0.0.1: it sent no handshake of horo"]


def test_silent_and_slow_connections_are_dropped_at_their_deadline(server: StoreServer, refusals: list[str]) -> None:
    with raw(server) as silent, raw(server) as slow, client_of(server) as client:
        slow.sendall(b"HORO")
        client.set("a", b"1")
        slow.sendall(b"\x01")
        assert client.get("a", 0) == b"1"
        assert silent.recv(1) == b""
        assert slow.recv(1) == b""
    assert refusals == ["refused a connection from 127.0.0.1: it did not finish the handshake in time"]


@pytest.mark.parametrize("changed", [5, 6, 11, 15, 19, 23])
def test_a_claim_that_is_changed_on_the_way_is_no_proof(changed: int) -> None:
    """Purpose, number, source, target, epoch, team: who sits between cannot pass one connection off as another."""
    dialer, near = socket.socketpair()
    acceptor = Acceptor(SECRET)

    def forge() -> None:
        hello = bytearray(near.recv(acceptor.missing_bytes, socket.MSG_WAITALL))
        hello[changed] ^= 7  # DATA becomes CONTROL
        near.sendall(acceptor.feed(bytes(hello)))

    with dialer, near:
        thread = threading.Thread(target=forge)
        thread.start()
        with pytest.raises(HandshakeError, match="does not know the job's secret"):
            authenticate(dialer, SECRET, Claim(Purpose.DATA, 1, 2, 3, 4, 5), time.monotonic() + 10)
        thread.join()


def test_other_version_is_named_on_both_sides(server: StoreServer, refusals: list[str]) -> None:
    with raw(server) as connection:
        connection.sendall(b"HORO\x07\x01\0\0" + bytes(16) + bytes(18) + bytes(32))
        answer = connection.recv(72, socket.MSG_WAITALL)
        assert answer[:5] == b"HORO\x03"
        assert answer[40:] == bytes(32)
    wait_until(lambda: bool(refusals), "it is refused")
    assert "version 7 of the handshake, this side version 3" in refusals[0]


def test_injected_or_replayed_frames_end_the_connection_not_the_service(server: StoreServer) -> None:
    session_frames = []
    for tamper in ("replay", "garbage", "huge", "malformed"):
        connection, handshake = dial(server.endpoints, SECRET, Claim(Purpose.STORE), 5)
        connection.settimeout(10)
        sealer = Sealer(handshake.send_key)
        frame = sealer.seal(b"\x01" + pack_fields([b"k", tamper.encode()]))
        connection.sendall(frame)
        opener = Opener(handshake.receive_key)
        replies: list[bytes] = []
        while not replies:
            replies = opener.feed(connection.recv(100))
        session_frames.append(replies)
        bad = {
            "replay": frame,
            "garbage": b"\0\0\0\x08" + os.urandom(40),
            "huge": b"\xff\xff\xff\xff",
            "malformed": sealer.seal(b"\x02" + pack_fields([b"short"])),
        }[tamper]
        connection.sendall(bad + bytes(64))
        with pytest.raises((ConnectionResetError, IndexError)):
            _ = connection.recv(1)[0]
        connection.close()
        with client_of(server) as client:
            assert client.get("k", 0) == tamper.encode()
    assert len(session_frames) == 4


def test_the_log_of_refused_connections_reports_once_a_minute_and_counts_the_rest() -> None:
    told: list[str] = []
    log = RefusalLog(told.append)
    for now in (0.0, 1.0, 59.0, 61.0):
        log.refuse("10.0.0.9", "noise", now)
    log.refuse("10.0.0.8", "noise", 61.0)
    assert told == [
        "refused a connection from 10.0.0.9: noise",
        "refused a connection from 10.0.0.9: noise (2 more refused since the last report)",
        "refused a connection from 10.0.0.8: noise",
    ]
    for number in range(3000):
        log.refuse(f"address {number}", "noise", 62.0)
    assert len(told) == 1 + 20  # of the minute that began at 61.0
    log.refuse("10.0.0.7", "noise", 121.0)
    assert told[-1] == "refused a connection from 10.0.0.7: noise (2982 more refused since the last report)"
    assert len(log._last) <= RefusalLog._ADDRESSES_MAX


def test_reporter_that_raises_does_not_end_the_service(caplog: pytest.LogCaptureFixture) -> None:
    with StoreServer(["127.0.0.1"], SECRET, on_refused=Mock(side_effect=RuntimeError("it broke"))) as server:
        with raw(server) as connection:
            connection.sendall(b"?" * 100)
            wait_until(lambda: "reporting a refused connection failed" in caplog.text, "the failure is in the log")
        with client_of(server) as client:
            client.set("a", b"")


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_fields_survive_packing(fields: list[bytes]) -> None:
    assert unpack_fields(pack_fields(fields)) == fields


@given(st.lists(st.binary(max_size=100), max_size=5), st.data())
def test_frames_open_in_order_whatever_the_pieces(payloads: list[bytes], data: st.DataObject) -> None:
    key = secrets.token_bytes(32)
    sealer, opener = Sealer(key), Opener(key)
    stream = b"".join(map(sealer.seal, payloads))
    opened = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        opened += opener.feed(stream[:cut])
        stream = stream[cut:]
    assert opened == payloads


def test_endpoints_are_read_as_written() -> None:
    text = "10.0.0.1:80,[fd00::1]:65535"
    assert parse_endpoints(text) == [Endpoint("10.0.0.1", 80), Endpoint("fd00::1", 65535)]
    assert ",".join(map(str, parse_endpoints(text))) == text


@pytest.mark.parametrize("text", ["", "h1:80", "10.0.0.1", "10.0.0.1:0", "10.0.0.1:65536", "fd00::1:80", "1.2.3.4:x,"])
def test_bad_endpoints_are_named(text: str) -> None:
    with pytest.raises(UsageError, match="ADDRESS:PORT"):
        parse_endpoints(text)
