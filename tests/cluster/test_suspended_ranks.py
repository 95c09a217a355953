"""Ranks on two hosts that are stopped, all of them, in the middle of an exchange, and continued."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import TORCH_S, Flags, wait_until
from namespaces import Cluster

PROGRAM = Path(__file__).parents[1] / "rank_program.py"
LIMIT_S = 5.0
BUFFERS = "net.ipv4.tcp_rmem"


@pytest.fixture
def narrow(cluster: Cluster) -> Iterator[Cluster]:
    """Hosts whose connections buffer so little that a sender soon waits for its receiver."""
    before = cluster.run_on(cluster.hosts[0], ["sysctl", "-n", BUFFERS]).stdout.strip()
    set_buffers(cluster, "4096 65536 131072")
    yield cluster
    set_buffers(cluster, before)


def set_buffers(cluster: Cluster, sizes: str) -> None:
    for host in cluster.hosts:
        assert cluster.run_on(host, ["sysctl", "-w", f"{BUFFERS}={sizes}"]).returncode == 0


def sums(flags: Flags, rank: int) -> int:
    return int(flags.read(f"sums.{rank}") or 0)


def pause(seconds: float) -> None:
    begin_s = time.monotonic()
    wait_until(lambda: time.monotonic() - begin_s > seconds, "the time has passed")


def stands_still(flags: Flags, rank: int) -> bool:
    """Whether the rank makes no sum for much longer than one takes."""
    before = sums(flags, rank)
    pause(1.0)
    return sums(flags, rank) == before


def test_ranks_that_are_stopped_for_longer_than_the_peer_timeout_go_on(narrow: Cluster, tmp_path: Path) -> None:
    flags = Flags(tmp_path)
    where = ",".join(f"{host.name}:1" for host in narrow.hosts)
    told = {"HORO_PEER_TIMEOUT": str(LIMIT_S)}
    job = narrow.start("-np", "2", sys.executable, str(PROGRAM), "sum", str(tmp_path), where=where, environment=told)
    flags.wait(["sums.0", "sums.1"])
    first, second = (int(flags.read(f"pid.{rank}")) for rank in range(2))
    os.kill(first, signal.SIGSTOP)
    wait_until(lambda: stands_still(flags, 1), "the other one waits for what is stopped")
    os.kill(second, signal.SIGSTOP)
    pause(2 * LIMIT_S)
    before = [sums(flags, rank) for rank in range(2)]
    os.kill(second, signal.SIGCONT)
    pause(1.0)
    os.kill(first, signal.SIGCONT)

    def has_ended_or_gone_on() -> bool:
        return job.process.poll() is not None or all(sums(flags, rank) > before[rank] + 1 for rank in range(2))

    wait_until(has_ended_or_gone_on, "both make sums again", deadline_s=TORCH_S)
    job.process.terminate()
    assert job.finish().returncode == 143
