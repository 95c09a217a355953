"""Two hosts: a lost host is detected, stopped ranks go on, and another user of a host learns and stops nothing."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jobs import TORCH_S, Flags, Launched, wait_until
from namespaces import Cluster
from plain_ranks import PlainRanks
from slurm import Slurm


@pytest.mark.parametrize("busy", [True, False], ids=["in transfers", "waiting"])
def test_a_host_that_is_cut_off_is_lost_to_both_sides(cluster: Cluster, tmp_path: Path, busy: bool) -> None:
    enter = {label: partial(cluster.on, host) for label, host in zip("ab", cluster.hosts, strict=True)}
    at = cluster.hosts[0].address
    with PlainRanks(tmp_path, "aabb", {"HORO_PEER_TIMEOUT": "3"}, enter=enter, serve_at=at) as ranks:
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


INTRUDER = Path(__file__).parents[1] / "intruder.py"
RANK = """
import os, pathlib, sys, time

folder = pathlib.Path(sys.argv[1])
rank = os.environ.get("SLURM_PROCID") or os.environ["HOROVOD_RANK"]
(folder / f"up.{rank}").touch()
deadline = time.monotonic() + 60
while not (folder / f"go.{rank}").exists():
    assert time.monotonic() < deadline
    time.sleep(0.01)

from horo.bootstrap.job import start

job = start()
(folder / f"secret.{rank}").write_text(job.directory.secret.hex())
job.close()
"""

Break = Callable[..., None]
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")


@pytest.fixture
def intrude(flags: Flags) -> Iterator[Break]:
    """Lets the intruder into the first host of a cluster; returns once he watches the ports."""
    with ExitStack() as ends:

        def enter(cluster: Cluster, *words: str) -> None:
            command = [sys.executable, str(INTRUDER), str(flags.folder / "report"), *words]
            launched: Launched = cluster.start_on(cluster.hosts[0], command)
            ends.callback(launched.kill)
            assert launched.process.stdout is not None
            assert launched.process.stdout.readline() == b"ready\n"

        yield enter


def findings(flags: Flags) -> dict[str, Any]:
    """The intruder's report."""
    wait_until(lambda: flags.read("report").endswith("}"), "the intruder has reported", deadline_s=TORCH_S)
    found: dict[str, Any] = json.loads(flags.read("report"))
    return found


def check(found: dict[str, Any], flags: Flags) -> None:
    assert found["ports"]
    assert found["connections"] >= 4
    assert not found["decoded"]
    assert found["environments"] == []
    secret = flags.read("secret.0")
    assert len(secret) == 64
    assert flags.read("secret.1") == secret
    assert not any(secret in command for command in found["commands"])


def test_another_user_learns_and_stops_nothing_under_ssh(cluster: Cluster, flags: Flags, intrude: Break) -> None:
    intrude(cluster, "1024-65535")
    a, b = cluster.hosts
    job = cluster.start("-np", "2", "--", sys.executable, "-c", RANK, str(flags.folder), where=f"{a.name}:1,{b.name}:1")
    flags.wait(["up.0", "up.1"])
    found = findings(flags)
    for rank in range(2):
        (flags.folder / f"go.{rank}").touch()
    done = job.finish()
    assert done.returncode == 0, done.stderr
    check(found, flags)


def test_another_user_learns_and_stops_nothing_under_slurm(slurm: Slurm, flags: Flags, intrude: Break) -> None:
    """He comes when rank 0 already waits for the other one, which does not come before he is done."""
    job = slurm.start(
        "srun", "--ntasks=2", "--ntasks-per-node=1", sys.executable, "-c", RANK, str(flags.folder)
    )  # fmt: skip
    flags.wait(["up.0", "up.1"])
    intrude(slurm.cluster, "10000-31999", "munge")
    (flags.folder / "go.0").touch()
    found = findings(flags)
    (flags.folder / "go.1").touch()
    done = job.finish()
    assert done.returncode == 0, done.stderr
    check(found, flags)
    assert found["credentials"] >= 1
    assert found["decodes"], "the intruder cannot decode his own credentials either"
