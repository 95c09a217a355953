"""Those without the secret, between ranks, at ports and sockets, and a member that sends nonsense, change nothing."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import run_python, wait_until

from horo.bootstrap.auth.frames import pack_fields
from horo.bootstrap.auth.handshake import Acceptor, Claim, HandshakeError, Purpose, authenticate
from horo.bootstrap.host import arena as arena_module
from horo.bootstrap.host.arena import Arena, _ArenaServer, _create, _receive_arena
from horo.bootstrap.net.addresses import Endpoint, bind_all
from horo.bootstrap.net.dial import dial
from horo.bootstrap.net.listener import ListenerThread
from horo.bootstrap.store.client import StoreClient
from horo.bootstrap.store.frames import INT64, KEY_BYTES_MAX, StoreRequest
from horo.bootstrap.store.protocol import StoreAbandonedError
from horo.bootstrap.store.server import StoreServer, _Client
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


def test_a_relayed_handshake_is_refused() -> None:
    refusals: list[str] = []
    admitted: list[socket.socket] = []
    listeners = bind_all(["127.0.0.1"])
    endpoint = Endpoint(*listeners[0].getsockname())
    thread = ListenerThread(
        listeners, SECRET, admit=lambda *_: None, on_peer=lambda peer, _: admitted.append(peer),
        on_refused=refusals.append
    )  # fmt: skip
    relay = Relay(endpoint)
    try:
        with pytest.raises(PeerLostError, match="closed the connection during the handshake"):
            dial([relay.endpoint], SECRET, CLAIM, 1)
        wait_until(lambda: bool(refusals), "it is refused")
        assert f"connected to {relay.endpoint} and has come out at {endpoint}" in refusals[0]
        assert relay.passed > 0
        assert not admitted
        connection, _ = dial([endpoint], SECRET, CLAIM, 5)
        connection.close()
    finally:
        relay.close()
        thread.close()
        for connection in admitted:
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
                authenticate(dialer, SECRET, CLAIM, time.monotonic() + 10)
            thread.join()


LIMIT = 64
SERVER = """
    import os, resource, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    from horo.bootstrap.store.server import StoreServer

    told = lambda sentence: print(sentence, file=sys.stderr, flush=True)
    with StoreServer(["127.0.0.1"], bytes(range(32)), handshake_timeout_s=600, on_refused=told) as server:
        print(server.endpoints[0].port, flush=True)
        sys.stdin.readline()
        opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(32)]
        print(server._listener.half_open_count, flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def limited() -> Iterator[tuple[Any, Endpoint]]:
    """A store in a process that may have 64 files open, and where it is."""
    command, pipe = [sys.executable, "-c", textwrap.dedent(SERVER)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as process:
        try:
            yield process, Endpoint("127.0.0.1", int(process.stdout.readline()))  # type: ignore[union-attr]
        finally:
            process.kill()


def test_strangers_do_not_use_up_the_descriptors(limited: tuple[Any, Endpoint]) -> None:
    process, endpoint = limited
    with contextlib.ExitStack() as crowd:
        for _ in range(2 * LIMIT):
            crowd.enter_context(socket.create_connection(endpoint))
        with StoreClient(*endpoint, SECRET, 30) as client:
            client.set("a", b"1")
            process.stdin.write(b"\n")
            assert 0 < int(process.stdout.readline()) <= LIMIT // 4


def test_a_process_that_can_open_no_further_file_says_so_to_both_sides(limited: tuple[Any, Endpoint]) -> None:
    process, endpoint = limited
    with contextlib.ExitStack() as clients:
        with pytest.raises(PeerLostError, match=r"127\.0\.0\.1:\d+: the process there can open no further file"):
            for _ in range(LIMIT):
                clients.enter_context(StoreClient(*endpoint, SECRET, 1.0))
        told = process.stderr.readline().decode()
        assert f"refused a connection from 127.0.0.1: this process has opened all the {LIMIT} files it may" in told


def test_the_limit_of_open_files_is_raised_where_that_may_be_and_ranks_have_that_of_before() -> None:
    script = """
        import resource
        from horo.bootstrap.net.open_files import make_room

        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
        for count in (8, 200, 1000):
            missing = make_room(count)
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            print(soft - count in range(32, 64), soft, hard, missing)
    """
    done = run_python("-c", textwrap.dedent(script), check=True)
    few, some, many = done.stdout.splitlines()
    assert few == "True 64 512 "
    assert some.startswith("True 2") and some.endswith(" 512 ")
    assert re.search(r"False 2\d\d 512 10\d\d open files, more than this process may have: raise its limit \(512", many)
    script = """
        import resource, sys
        from horo.runner import processes

        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))
        processes.raise_descriptor_limit()
        processes.raise_descriptor_limit()
        print(resource.getrlimit(resource.RLIMIT_NOFILE))
        program = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))"
        child = processes.spawn([sys.executable, "-c", program], environment={})
        child.wait()
        print(child.stdout.read().decode())
    """
    done = run_python("-c", textwrap.dedent(script), check=True)
    assert done.stdout.split("\n")[:2] == ["(512, 512)", "(256, 512)"]


MEMBERS = 10
STRANGER = 65534
CROWD = """
    import os, socket, sys

    os.setuid(int(sys.argv[1]))
    name, held, count = bytes.fromhex(sys.argv[2]), [], 0
    while True:
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            connection.connect(name)
            held.append(connection)
        except OSError:
            connection.close()
        if len(held) > 400:
            held.pop(0).close()
        count += 1
        if count == 1000:
            print("crowded", flush=True)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")
def test_members_get_the_memory_through_a_crowd_of_another_user() -> None:
    arena = _create(MEMBERS + 1, lambda count: 4096)
    server = _ArenaServer(arena, 0, range(MEMBERS + 1), 1)
    name = server.listen(SECRET)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CROWD), str(STRANGER), name.hex()], stdout=subprocess.PIPE
    ) as crowd:
        try:
            assert crowd.stdout is not None
            assert crowd.stdout.readline() == b"crowded\n"
            for rank in range(1, MEMBERS + 1):
                claim = Claim(Purpose.ARENA, rank, 0, 1)
                received, connection = _receive_arena(name, SECRET, claim, (MEMBERS + 1, 4096), 10.0)
                assert len(received) == MEMBERS + 2
                Arena(received[0], received[1:]).close()
                connection.close()
            assert crowd.poll() is None
        finally:
            crowd.kill()
            server.close()
            arena.close()


def test_a_full_queue_of_the_socket_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")
        listener.listen(0)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                held.append(socket.socket(socket.AF_UNIX))
                held[-1].setblocking(False)
                held[-1].connect(listener.getsockname())
        waits: list[float] = []

        def drain(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                held.append(listener.accept()[0])

        clock = SimpleNamespace(monotonic=lambda: float(len(waits)), sleep=drain)
        monkeypatch.setattr(arena_module, "time", clock)
        with socket.socket(socket.AF_UNIX) as member:
            member.settimeout(10)
            arena_module._connect(member, listener.getsockname(), 100.0)
            assert member.getpeername() == listener.getsockname()
        assert len(waits) == 3
        with socket.socket(socket.AF_UNIX) as member, pytest.raises(BlockingIOError):
            member.settimeout(10)
            arena_module._connect(member, listener.getsockname(), 5.0)
    for connection in held:
        connection.close()


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
        b"", b"\x00", b"\xff" + pack_fields([]), bytes([StoreRequest.SET]), message(StoreRequest.SET),
        message(StoreRequest.SET, b"key"), message(StoreRequest.SET, b"key", b"value", b"more"),
        message(StoreRequest.SET, b"", b"value"), message(StoreRequest.SET, b"k" * (KEY_BYTES_MAX + 1), b"value"),
        message(StoreRequest.GET), message(StoreRequest.GET, NOW), message(StoreRequest.GET, b"", b"", b"key"),
        message(StoreRequest.GET, NOW, b"", b""), message(StoreRequest.ADD, b"key"),
        message(StoreRequest.ADD, b"key", b"1"), message(StoreRequest.ADD, b"", NOW),
        message(StoreRequest.DELETE, b""), message(StoreRequest.ON_DISCONNECT, b"key"),
        message(StoreRequest.ON_DISCONNECT, b"", b"value"),
        message(StoreRequest.ON_DISCONNECT, b"key", b"value", b"more"),
    ],
)  # fmt: skip
def test_a_malformed_request_ends_its_connection_alone(server: StoreServer, payload: bytes) -> None:
    assert send(server, payload) == b""
    check_serves(server)


def test_members_that_vanish_while_they_wait_for_each_other_do_not_stop_the_store(server: StoreServer) -> None:
    """Each leaves the value that the others wait for, and the store finds out while it answers them."""
    gone = [client_of(server) for _ in range(4)]
    waiting = client_of(server)
    for client in gone:
        client.set_on_disconnect("failed", b"gone")
    real = server._flush

    def flush(client: _Client) -> None:
        if client.on_disconnect is not None and b"failed" in server._values:
            raise BrokenPipeError
        real(client)

    server._flush = flush
    try:
        with client_of(server) as last, ThreadPoolExecutor(5) as pool:
            waits = [pool.submit(client.get, "never", 30, unless="failed") for client in [*gone, waiting]]
            while len(server._waiters) < len(waits):
                last.add("turns", 1)
            last.set("failed", b"first")
            ends = [wait.exception(30) for wait in waits]
            assert last.get("failed", 10) == b"first"
            last.delete(["failed"])
    finally:
        del server._flush
        for client in [*gone, waiting]:
            client.close()
    assert [type(end) for end in ends] == [PeerLostError] * 4 + [StoreAbandonedError]
    check_serves(server)
