"""Another user of the host crowds the socket over which shared memory is passed; the ranks get through."""

from __future__ import annotations

import os
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

SECRET = bytes(range(32))
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
