"""horo under a real Slurm of two hosts."""

from __future__ import annotations

from slurm import Slurm

TASK = "echo $SLURM_PROCID $(hostname) $SLURM_LOCALID $SLURM_STEP_NODELIST $SLURM_STEP_TASKS_PER_NODE"


def test_srun_starts_tasks_on_both_hosts(slurm: Slurm) -> None:
    a, b = slurm.cluster.hosts
    done = slurm.run("srun", "--ntasks=3", "--ntasks-per-node=2", "sh", "-c", TASK)
    assert (done.returncode, done.stderr) == (0, "")
    nodes = f"{a.name[:-1]}[1-2] 2,1"
    expected = [(0, a, 0), (1, a, 1), (2, b, 0)]
    assert sorted(done.stdout.splitlines()) == [f"{rank} {host.name} {local} {nodes}" for rank, host, local in expected]
