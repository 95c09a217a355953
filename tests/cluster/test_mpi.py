"""horo started by others on two hosts: mpirun of Open MPI, mpiexec of MPICH, over ssh, and torchrun, which starts all
ranks again when one fails.
"""

import sys
from pathlib import Path

import pytest
from jobs import TORCH_S
from mpis import Mpi
from namespaces import Cluster
from places import PLACE, PROGRAM, expected, written
from torchrun_rounds import PROGRAM as TRAINING
from torchrun_rounds import check


def where(cluster: Cluster, layout: str) -> str:
    return ",".join(f"{host.name}:{layout.count(letter)}" for letter, host in zip("ab", cluster.hosts, strict=True))


@pytest.mark.parametrize("layout", ["aaab", "abab"])
def test_ranks_start_with_the_right_places(cluster: Cluster, mpi: Mpi, tmp_path: Path, layout: str) -> None:
    passed = [mpi.pass_on, "HORO_TRANSPORT"] if mpi.pass_on else []
    cyclic = mpi.cyclic if layout == "abab" else ()
    words = [mpi.starter, mpi.hosts, where(cluster, layout), "-np", "4", *passed, *cyclic, *PLACE, str(tmp_path)]
    done = cluster.start_on(cluster.hosts[0], words, environment=mpi.environment).finish()
    assert done.returncode == 0, done.stderr
    assert written(tmp_path) == expected(layout, cluster, mpi.library)


def test_hororun_has_mpirun_start_the_ranks(cluster: Cluster, mpi: Mpi, tmp_path: Path) -> None:
    words = ["--mpi", "-np", "4", "--oversubscribe", *PLACE, str(tmp_path)]
    done = cluster.run(*words, where=where(cluster, "aaab"), environment=mpi.environment)
    assert done.returncode == 0, done.stderr
    assert written(tmp_path) == expected("aaab", cluster, mpi.library)


def test_torchrun_on_two_hosts_with_a_static_rendezvous(cluster: Cluster, tmp_path: Path) -> None:
    first = [f"--master-addr={cluster.hosts[0].name}", "--master-port=29500"]
    jobs = []
    for node, host in enumerate(cluster.hosts):
        torchrun = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}", *first]
        command = [sys.executable, "-m", *torchrun, *PROGRAM, str(tmp_path)]
        jobs.append(cluster.start_on(host, command, environment={"OMP_NUM_THREADS": "1"}))
    for job in jobs:
        done = job.finish(TORCH_S)
        assert done.returncode == 0, done.stderr
    assert written(tmp_path) == expected("aabb", cluster)


def test_the_next_round_goes_on_from_the_commit(cluster: Cluster, tmp_path: Path) -> None:
    """Its ranks find each other at once. (test_elastic_torchrun.py has rank 0 as the victim.)"""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2"]
    at = ["--rdzv-backend=c10d", f"--rdzv-endpoint={cluster.hosts[0].address}:29500"]
    words = [*torchrun, *at, str(TRAINING), str(tmp_path), "1"]
    jobs = [cluster.start_on(host, [*words, host.name], environment={"OMP_NUM_THREADS": "1"}) for host in cluster.hosts]
    all_done = [job.finish(3 * TORCH_S) for job in jobs]
    shown = "".join(done.stdout + done.stderr for done in all_done)
    assert [done.returncode for done in all_done] == [0, 0], shown
    check("".join(done.stdout for done in all_done))
