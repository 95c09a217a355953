"""horo started by others on two hosts: mpirun of Open MPI, mpiexec of MPICH, over ssh, and torchrun."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from jobs import TORCH_S
from mpis import Mpi
from namespaces import Cluster
from places import LOSE, PLACE, PROGRAM, expected, written

TORCH = """
import pathlib, sys
import torch
import horo.torch as hvd
hvd.init()
mean = hvd.allreduce(torch.full([3], hvd.rank() + 1.0), name="x")
pathlib.Path(sys.argv[1], str(hvd.rank())).write_text(f"{hvd.size()} {mean.tolist()} {hvd.mpi_enabled()}")
"""


def command(mpi: Mpi, cluster: Cluster, layout: str, names: Iterable[str] = ("HORO_TRANSPORT",)) -> list[str]:
    """What begins the command line of a job whose ranks are placed like ``layout`` and get the variables ``names``."""
    words = [mpi.starter, mpi.hosts, where(cluster, layout), "-np", str(len(layout))]
    passed = [word for name in names for word in (mpi.pass_on, name)] if mpi.pass_on else []
    return [*words, *passed, *(mpi.cyclic if layout == "abab" else ())]


def where(cluster: Cluster, layout: str) -> str:
    return ",".join(f"{host.name}:{layout.count(letter)}" for letter, host in zip("ab", cluster.hosts, strict=True))


@pytest.mark.parametrize("layout", ["aabb", "aaab", "abab"])
def test_ranks_start_with_the_right_places(cluster: Cluster, mpi: Mpi, tmp_path: Path, layout: str) -> None:
    words = [*command(mpi, cluster, layout), *PLACE, str(tmp_path)]
    done = cluster.start_on(cluster.hosts[0], words, environment=mpi.environment).finish()
    assert done.returncode == 0, done.stderr
    assert written(tmp_path) == expected(layout, cluster, mpi.library)


def test_a_script_with_torch_needs_no_word_about_mpi(cluster: Cluster, mpi: Mpi, tmp_path: Path) -> None:
    told = {"HORO_TRANSPORT": ""}
    words = [*command(mpi, cluster, "ab", told), sys.executable, "-c", TORCH, str(tmp_path)]
    done = cluster.start_on(cluster.hosts[0], words, environment={**mpi.environment, **told}).finish(TORCH_S)
    assert done.returncode == 0, done.stderr
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys("01", "2 [1.5, 1.5, 1.5] True")


@pytest.mark.parametrize("layout", ["aabb", "aaab"])
def test_hororun_has_mpirun_start_the_ranks(cluster: Cluster, mpi: Mpi, tmp_path: Path, layout: str) -> None:
    words = ["--mpi", "-np", "4", "--oversubscribe", *PLACE, str(tmp_path)]
    done = cluster.run(*words, where=where(cluster, layout), environment=mpi.environment)
    assert done.returncode == 0, done.stderr
    assert written(tmp_path) == expected(layout, cluster, mpi.library)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_ends_the_job_and_is_named(cluster: Cluster, mpi: Mpi, tmp_path: Path, victim: int) -> None:
    words = [*command(mpi, cluster, "aabb"), *mpi.spare, *LOSE, str(victim), str(tmp_path)]
    done = cluster.start_on(cluster.hosts[0], words, environment=mpi.environment).finish()
    assert done.returncode != 0
    host = cluster.hosts[victim // 2].name
    said = "".join(file.read_text() for file in tmp_path.iterdir()) + done.stdout + done.stderr
    by_mpirun = rf"rank {victim} with PID \d+ on node {host} exited on\s+signal 9"
    assert re.search(rf"rank {victim} \({host}\) is gone|{by_mpirun}", said), done


RENDEZVOUS = {
    "static": ["--node-rank={node}", "--master-addr={first}", "--master-port=29500"],
    "c10d": ["--rdzv-backend=c10d", "--rdzv-endpoint={first}:29500", "--rdzv-id=train"],
}


@pytest.mark.parametrize(("rendezvous", "layout"), [("static", "aabb"), ("c10d", "ab")])
def test_torchrun_on_two_hosts(cluster: Cluster, tmp_path: Path, rendezvous: str, layout: str) -> None:
    jobs = []
    for node, host in enumerate(cluster.hosts):
        options = [option.format(node=node, first=cluster.hosts[0].name) for option in RENDEZVOUS[rendezvous]]
        torchrun = ["torch.distributed.run", "--nnodes=2", f"--nproc-per-node={layout.count('a')}", *options]
        command = [sys.executable, "-m", *torchrun, *PROGRAM, str(tmp_path)]
        jobs.append(cluster.start_on(host, command, environment={"OMP_NUM_THREADS": "1"}))
    for job in jobs:
        done = job.finish(TORCH_S)
        assert done.returncode == 0, done.stderr
    assert written(tmp_path) == expected(layout, cluster)
