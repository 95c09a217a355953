"""Unauthenticated connections to every port of a job, during the start and later, change nothing but the log."""

import contextlib
import os
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
from jobs import DEADLINE_S, Flags, Hororun, Launched, marked_processes, wait_until

from horo.bootstrap.auth.handshake import Claim, HandshakeError, Purpose, authenticate

TESTS = Path(__file__).parents[1]
WORK = """
import os, pathlib, sys, time
sys.path.insert(0, {tests!r})
from plain_rank import Rank, bootstrap

flags, number = pathlib.Path({flags!r}), os.environ["HOROVOD_RANK"]
os.environ["HORO_HOST_ID"] = number  # every rank a host of its own, with a port for the others

def wait_for(name):
    deadline = time.monotonic() + {deadline_s}
    while not (flags / name).exists() and time.monotonic() < deadline:
        time.sleep(0.01)

real = bootstrap.connect_hosts
def connect_late(*arguments, **options):
    (flags / f"connecting.{{number}}").touch()
    if number != "0":
        wait_for("connect")
    return real(*arguments, **options)

bootstrap.connect_hosts = connect_late
rank = Rank()
rank.start()
(flags / f"ready.{{number}}").touch()
wait_for("work")
for _ in range(200):
    result = rank.allreduce("x", 100_000)
print(result)
rank.close()
"""


def listening_ports(job: Launched) -> dict[int, int]:
    """Port and process of every TCP listener of a job."""
    found = {}
    for pid in [job.process.pid, *marked_processes(job.mark)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in psutil.Process(pid).net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found[each.laddr.port] = pid
    return found


def named_memory(job: Launched) -> list[str]:
    """Shared memory that has a name, which would outlive the job, in any of its processes."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in marked_processes(job.mark)]
    assert any("memfd:" in text for text in maps)
    return [line for text in maps for line in text.splitlines() if "/dev/shm" in line or "SYSV" in line]


def send_noise(stack: contextlib.ExitStack, port: int) -> None:
    """Noise, another protocol, silence, half a handshake and a wrong secret; the connections stay open."""

    def connect() -> socket.socket:
        return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))

    for words in (os.urandom(4096), b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"", b"HORO\x01"):
        with contextlib.suppress(ConnectionError):  # refused in the middle of it
            connect().sendall(words)
    with pytest.raises(HandshakeError):
        authenticate(connect(), os.urandom(32), Claim(Purpose.DATA, 1, 0, 1), time.monotonic() + 10)


def test_who_lacks_the_secret_is_refused_and_reported_and_the_job_goes_on(hororun: Hororun, tmp_path: Path) -> None:
    script = WORK.format(tests=str(TESTS), flags=str(tmp_path), deadline_s=DEADLINE_S)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    flags = Flags(tmp_path)
    with contextlib.ExitStack() as stack:
        job = hororun.start("-np", "3", sys.executable, "-c", script, environment={"TMPDIR": str(temporary)})
        flags.wait([f"connecting.{rank}" for rank in range(3)])
        wait_until(lambda: len(set(listening_ports(job).values())) > 1, "hororun listens, and a rank")
        ports = listening_ports(job)
        for port in ports:
            send_noise(stack, port)
        (tmp_path / "connect").touch()
        flags.wait([f"ready.{rank}" for rank in range(3)])
        assert listening_ports(job).keys() < ports.keys(), "ranks that are connected listen no more"
        for port in listening_ports(job):
            send_noise(stack, port)
        assert not named_memory(job)
        (tmp_path / "work").touch()
        done = job.finish()
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] [6.0, 6.0]" for rank in range(3)]
    assert "hororun: refused a connection from 127.0.0.1" in done.stderr, done.stderr
    assert "[0] horo [0] warning: refused a connection from 127.0.0.1" in done.stderr, done.stderr
    assert not list(temporary.iterdir())
