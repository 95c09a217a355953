"""Crowds of silent strangers at a port of the job, or at the socket that passes shared memory: members get in."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from horo.bootstrap.auth.handshake import Claim, Purpose
from horo.bootstrap.host import arena as arena_module
from horo.bootstrap.host.arena import Arena, _ArenaServer, _create, _receive_arena
from horo.bootstrap.net.addresses import Endpoint
from horo.bootstrap.store.client import StoreClient
from horo.errors import PeerLostError

SECRET = bytes(range(32))
LIMIT = 64
FULL_SERVER = """
    import resource, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    from horo.bootstrap.store.server import StoreServer

    told = lambda sentence: print(sentence, flush=True)
    with StoreServer(["127.0.0.1"], bytes(range(32)), on_refused=told) as server:
        print(server.endpoints[0].port, flush=True)
        sys.stdin.readline()
"""
SERVER = """
    import os, resource, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
    from horo.bootstrap.store.server import StoreServer

    with StoreServer(["127.0.0.1"], bytes(range(32)), handshake_timeout_s=600) as server:
        print(server.endpoints[0].port, flush=True)
        sys.stdin.readline()
        opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(int(sys.argv[1]) // 2)]
        print(server._listener.half_open_count, flush=True)
        sys.stdin.readline()
"""


def test_strangers_do_not_use_up_the_descriptors() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SERVER), str(LIMIT)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as server:  # fmt: skip
        crowd = []
        try:
            assert server.stdin is not None and server.stdout is not None
            endpoint = Endpoint("127.0.0.1", int(server.stdout.readline()))
            crowd = [socket.create_connection(endpoint) for _ in range(2 * LIMIT)]
            with StoreClient(*endpoint, SECRET, 30) as client:
                client.set("a", b"1")
                server.stdin.write(b"\n")
                assert 0 < int(server.stdout.readline()) <= LIMIT // 4
        finally:
            server.kill()
            for connection in crowd:
                connection.close()


def test_a_process_that_can_open_no_further_file_says_so_to_both_sides() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(FULL_SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as server, contextlib.ExitStack() as clients:  # fmt: skip
        try:
            assert server.stdout is not None
            endpoint = Endpoint("127.0.0.1", int(server.stdout.readline()))
            with pytest.raises(PeerLostError, match=r"127\.0\.0\.1:\d+: the process there can open no further file"):
                for _ in range(LIMIT):
                    clients.enter_context(StoreClient(*endpoint, SECRET, 1.0))
            told = server.stdout.readline().decode()
            assert f"refused a connection from 127.0.0.1: this process has opened all the {LIMIT} files it may" in told
        finally:
            server.kill()


def test_the_limit_of_open_files_is_raised_to_what_is_needed_where_that_may_be() -> None:
    script = """
        import resource
        from horo.bootstrap.net.open_files import make_room

        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
        for count in (8, 200, 1000):
            missing = make_room(count)
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            print(soft - count in range(32, 64), soft, hard, missing)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=True
    )
    few, some, many = done.stdout.splitlines()
    assert few == "True 64 512 "
    assert some.startswith("True 2") and some.endswith(" 512 ")
    assert re.search(r"False 2\d\d 512 10\d\d open files, more than this process may have: raise its limit \(512", many)


def test_hororun_may_open_all_files_and_its_ranks_have_the_limit_of_before() -> None:
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
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=True
    )
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


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = _create(MEMBERS + 1, lambda count: 4096)
    yield made
    made.close()


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")
def test_members_get_the_memory_through_a_crowd_of_another_user(arena: Arena) -> None:
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
