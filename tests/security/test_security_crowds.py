"""Silent strangers at a port of the job: members get in, and descriptors are left for the job."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap

from horo._bootstrap.net.addresses import Endpoint
from horo._bootstrap.store.client import StoreClient

SECRET = bytes(range(32))
LIMIT = 64
SERVER = """
    import os, resource, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
    from horo._bootstrap.store.server import StoreServer

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
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
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
