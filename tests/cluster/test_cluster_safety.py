"""Two hosts: training is that of one process, a lost host is detected, and stopped ranks go on."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from jobs import TORCH_S, Flags, wait_until
from namespaces import Cluster, ClusterHost
from plain_ranks import PlainRanks

ROOT = Path(__file__).parents[2]
DIGITS = [sys.executable, str(ROOT / "examples" / "digits.py"), "--epochs", "2"]


def results(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("epoch", "test accuracy"))]


@pytest.mark.timeout(800)
def test_training_on_two_hosts_gives_lines_of_one_process(cluster: Cluster) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that spin for each other take minutes on a busy machine
    alone = subprocess.run(DIGITS, env=environ, capture_output=True, text=True, check=True, timeout=4 * TORCH_S)
    where = ",".join(f"{host.name}:2" for host in cluster.hosts)
    done = cluster.start("-np", "4", "--no-prefix", *DIGITS, where=where).finish(4 * TORCH_S)
    assert done.returncode == 0, done.stderr
    assert results(done.stdout) == results(alone.stdout)
    assert len(results(done.stdout)) == 3


def on_both(cluster: Cluster, folder: Path, hosts: str, environment: dict[str, str] | None = None) -> PlainRanks:
    """Ranks whose hosts ``a`` and ``b`` are those of the cluster."""

    def entry(host: ClusterHost) -> Callable[[Sequence[str]], list[str]]:
        return lambda argv: cluster.on(host, argv)

    enter = {label: entry(host) for label, host in zip("ab", cluster.hosts, strict=True)}
    return PlainRanks(folder, hosts, environment or {}, enter=enter, serve_at=cluster.hosts[0].address)


@pytest.mark.parametrize("busy", [True, False], ids=["in transfers", "waiting"])
def test_a_host_that_is_cut_off_is_lost_to_both_sides(cluster: Cluster, tmp_path: Path, busy: bool) -> None:
    with on_both(cluster, tmp_path, "aabb", {"HORO_PEER_TIMEOUT": "3"}) as ranks:
        ranks.all("start")
        ranks.all("allreduce", "x")
        if busy:
            ranks.all("repeat", "x", 1 << 20, 10000)
        cluster.cut(cluster.hosts[1])
        if not busy:
            for rank in range(4):
                ranks.tell(rank, "allreduce", "x")
        for rank in range(4):
            answer = ranks.answer(rank)
            assert (answer.get("error"), answer.get("lost")) == ("PeerLostError", True), f"rank {rank}: {answer}"
            far = {"a": "[23] \\(host-b", "b": "[01] \\(host-a"}[ranks.hosts[rank]]
            assert re.match(rf"rank {far}\) is (out of reach: no answer for 3 s|gone)", answer["text"]), answer


PROGRAM = Path(__file__).parents[1] / "rank_program.py"
LIMIT_S = 3.0
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
