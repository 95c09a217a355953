"""Another user of a rank's host does what he can while a job starts by a real sshd, and by a real Slurm with MUNGE."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from jobs import TORCH_S, Flags, Launched, wait_until
from namespaces import Cluster
from slurm import Slurm

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
