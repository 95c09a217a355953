"""The scripts in ``examples/batch`` do what they say, without a change in them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from mpis import Mpi
from namespaces import Cluster
from places import PROGRAM, expected, written
from slurm import Slurm

ROOT = Path(__file__).parents[2]
BATCH = ROOT / "examples" / "batch"
VENV = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


@pytest.mark.parametrize("start", ["srun", "hororun"])
def test_slurm_without_mpi(slurm: Slurm, tmp_path: Path, start: str) -> None:
    words = [str(BATCH / "slurm.sbatch"), *PROGRAM, str(tmp_path)]
    job = slurm.batch(tmp_path, *words, environment={"PATH": VENV, "START": start})
    assert (job.state, job.exit_code, job.output) == ("COMPLETED", "0:0", "")
    assert written(tmp_path) == expected("aabb", slurm.cluster)


@pytest.mark.parametrize("start", ["srun", "mpirun"])
def test_slurm_with_mpi(slurm: Slurm, mpi: Mpi, tmp_path: Path, start: str) -> None:
    told = {**mpi.environment, "START": f"srun --mpi={mpi.under_srun}" if start == "srun" else start}
    words = [str(BATCH / "slurm-mpi.sbatch"), *PROGRAM, str(tmp_path)]
    job = slurm.batch(tmp_path, *words, environment=told)
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), job.output
    assert written(tmp_path) == expected("aabb", slurm.cluster, mpi.library)


def test_slurm_trains(slurm: Slurm, tmp_path: Path) -> None:
    options = ["--ntasks-per-node=1", "--cpus-per-task=1"]
    words = [*options, str(BATCH / "slurm.sbatch"), str(ROOT / "examples" / "digits.py"), "--epochs", "2"]
    job = slurm.batch(tmp_path, *words, environment={"PATH": VENV, "START": ""})
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), job.output
    assert "2 rank(s) with 48 images per step each" in job.output
    assert "test accuracy: 0.88" in job.output


def test_slurm_says_that_a_job_has_failed(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('no data')")
    job = slurm.batch(tmp_path, str(BATCH / "slurm.sbatch"), "train.py", environment={"PATH": VENV, "START": "hororun"})
    assert (job.state, job.exit_code) == ("FAILED", "1:0")
    assert "rank " in job.output
    assert "exited with code 1" in job.output


ASKS_FOR_A_REQUEUE = """
import sys
from horo.bootstrap.job import start
from horo.core.context import OPS, RequestBuffer
job = start()
job.context.finish(job.context.submit(RequestBuffer.of(OPS["barrier"], "last")))
sys.exit(75)
"""


def test_slurm_is_asked_for_a_requeue_by_the_script_of_the_page(slurm: Slurm, tmp_path: Path) -> None:
    """All ranks come through the barrier, whichever ends first, and srun exits with their code."""
    page = (ROOT / "docs" / "how-to" / "preemption.md").read_text()
    (tmp_path / "job.sh").write_text(page.partition("```bash script=srun\n")[2].partition("```")[0])
    (tmp_path / "train.py").write_text(ASKS_FOR_A_REQUEUE)
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/scontrol.log"\n')
    (tmp_path / "scontrol").chmod(0o755)
    job = slurm.batch(tmp_path, "--ntasks-per-node=2", "job.sh", environment={"PATH": f"{tmp_path}:{VENV}"})
    assert (job.state, job.exit_code) == ("FAILED", "75:0"), job.output
    assert job.output.count("Error") == 0
    assert (tmp_path / "scontrol.log").read_text() == f"requeue {job.number}\n"


@pytest.mark.parametrize("name", ["pbs", "lsf", "sge"])
def test_other_systems_by_what_they_set(cluster: Cluster, tmp_path: Path, name: str) -> None:
    a, b = (host.name for host in cluster.hosts)
    file = tmp_path / "hosts"
    file.write_text(
        {"pbs": f"{a}\n{a}\n{b}\n", "lsf": "", "sge": f"{a} 2 all.q@{a} UNDEFINED\n{b} 1 all.q@{b} UNDEFINED\n"}[name]
    )
    told = {
        "pbs": {"PBS_JOBID": "7.server", "PBS_NODEFILE": str(file), "PBS_O_WORKDIR": str(tmp_path)},
        "lsf": {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": f"{a} 2 {b} 1", "LSB_DJOB_NUMPROC": "3"},
        "sge": {"JOB_ID": "7", "PE_HOSTFILE": str(file), "NSLOTS": "3", "NHOSTS": "2"},
    }[name]
    shutil.copy(BATCH / f"{name}.sh", tmp_path / "job")
    head = f"import runpy, sys\nsys.path.insert(0, {str(Path(PROGRAM[0]).parent)!r})\n"
    words = f"sys.argv += {[*PROGRAM[1:], str(tmp_path)]!r}\n"
    (tmp_path / "train.py").write_text(f"{head}{words}runpy.run_path({PROGRAM[0]!r}, run_name='__main__')\n")
    job = cluster.start_on(cluster.hosts[0], ["bash", "job"], cwd=tmp_path, environment={"PATH": VENV, **told})
    done = job.finish()
    assert (done.returncode, done.stderr) == (0, ""), done
    assert written(tmp_path) == expected("aab", cluster)
