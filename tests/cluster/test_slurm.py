"""horo under a real Slurm of two hosts; the scripts in ``examples/batch`` do what they say, as they are."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import pytest
from jobs import Flags, wait_until
from mpis import Mpi
from namespaces import Cluster
from places import LOSE, PLACE, PROGRAM, expected, written
from slurm import Slurm

TASK = "echo $SLURM_PROCID $(hostname) $SLURM_LOCALID $SLURM_STEP_NODELIST $SLURM_STEP_TASKS_PER_NODE"
HORORUN = [sys.executable, "-m", "horo.runner"]
LAYOUTS = {
    "aabb": ["--ntasks=4", "--ntasks-per-node=2"],
    "aaab": ["--ntasks=4", "--nodes=2"],
    "abab": ["--ntasks=4", "--ntasks-per-node=2", "--distribution=cyclic"],
    "abaa": ["--ntasks=4", "--nodes=2", "--distribution=cyclic"],
    "ab": ["--ntasks=2", "--ntasks-per-node=1"],
    "aa": ["--ntasks=2", "--nodes=1"],
}


@pytest.mark.parametrize("layout", ["aaab", "abab", "abaa", "ab", "aa"])
def test_srun_without_mpi(slurm: Slurm, tmp_path: Path, layout: str) -> None:
    done = slurm.run("srun", *LAYOUTS[layout], *PLACE, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert written(tmp_path) == expected(layout, slurm.cluster)


@pytest.mark.parametrize("variable", ["HORO_SECRET", "HOME"])
def test_ranks_start_without_munge(slurm: Slurm, tmp_path: Path, variable: str) -> None:
    value = {"HORO_SECRET": "5a" * 32, "HOME": str(tmp_path)}[variable]
    done = slurm.run("srun", *LAYOUTS["ab"], "env", "PATH=/nowhere", f"{variable}={value}", *PLACE, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert written(tmp_path) == expected("ab", slurm.cluster)


def test_a_process_alone_in_a_batch_job_of_several_tasks_is_told_what_to_type(slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n{' '.join(PLACE)} {tmp_path}\n")
    done = slurm.batch(tmp_path, *LAYOUTS["aabb"], str(script))
    assert done.state == "COMPLETED"
    assert done.output.startswith("horo [0] warning: this process is alone (size 1), but the Slurm job has 4 tasks")
    assert done.output.count("\n") == 1
    script.write_text(f"#!/bin/sh\nsrun --ntasks=1 --nodes=1 {' '.join(PLACE)} {tmp_path}\n")
    assert slurm.batch(tmp_path, *LAYOUTS["aabb"], str(script)).output == ""
    assert "warning" not in slurm.run("salloc", *LAYOUTS["aabb"], *PLACE, str(tmp_path)).stderr


def test_hororun_takes_its_hosts_from_slurm_and_needs_no_ssh(slurm: Slurm, tmp_path: Path) -> None:
    command = ["salloc", *LAYOUTS["aaab"], *HORORUN, "--verbose", *PLACE, str(tmp_path)]
    done = slurm.run(*command)
    assert done.returncode == 0, done.stderr
    assert f"{slurm.cluster.hosts[1].name}: srun " in done.stderr
    assert written(tmp_path) == expected("aaab", slurm.cluster)
    done = slurm.run("salloc", *LAYOUTS["aabb"], *HORORUN, "--check-hosts")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(": ok: ")[0] for line in lines] == [host.name for host in slurm.cluster.hosts]


def test_a_rank_that_is_killed_ends_the_step_or_hororun_and_is_named(slurm: Slurm) -> None:
    done = slurm.run("srun", *LAYOUTS["aabb"], *LOSE, "3")
    assert done.returncode == 137
    b = slurm.cluster.hosts[1].name
    assert done.stderr.count(f"PeerLostError: rank 3 ({b}) is gone") == 3, done.stderr
    assert f"srun: error: {b}: task 3: Killed" in done.stderr
    done = slurm.run("salloc", *LAYOUTS["aabb"], *HORORUN, *LOSE, "3")
    assert done.returncode == 137
    assert f"rank 3 on {b} was killed by SIGKILL" in done.stderr


def test_a_rank_that_is_killed_ends_a_step_with_mpi_and_is_named(slurm: Slurm, mpi: Mpi) -> None:
    command = ["srun", f"--mpi={mpi.under_srun}", *LAYOUTS["aabb"], *LOSE, "3"]
    done = slurm.run(*command, environment=mpi.environment)
    assert done.returncode != 0
    b = slurm.cluster.hosts[1].name
    assert re.search(rf"rank 3 \({b}\) is gone|{b}: task 3: Killed", done.stderr), done.stderr


def cancel(slurm: Slurm, folder: Path, start: Sequence[str], environment: Mapping[str, str]) -> None:
    """Cancels a batch job of four ranks that sum for ever; nothing of it may be left."""
    script, flags = folder / "job.sh", Flags(folder)
    rank = "${HOROVOD_RANK:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$SLURM_PROCID}}}"
    task = f": > {folder}/up.{rank}; exec {' '.join(LOSE)} -1"
    script.write_text(f'#!/bin/sh\n{" ".join(start)} sh -c "$TASK"\n')
    number, job = slurm.queue(folder, *LAYOUTS["aabb"], str(script), environment={"TASK": task, **environment})
    flags.wait([f"up.{number}" for number in range(4)])
    slurm.run("scancel", str(number))
    assert slurm.finish(number, job).state == "CANCELLED"


NOTING = """
import os, signal, sys
folder, numbers = sys.argv[1], [int(number) for number in sys.argv[2:]]
rank = os.environ.get("HOROVOD_RANK") or os.environ["SLURM_PROCID"]
def note(number, frame):
    with open(f"{folder}/got.{rank}", "a") as file:
        file.write(f"{int(number)}\\n")
for number in numbers:
    signal.signal(number, note)
open(f"{folder}/up.{rank}", "w").close()
while True:
    signal.pause()
"""
TRAPPED = ["HUP", "QUIT", "ABRT", "ALRM", "USR2", "XCPU", str(int(signal.SIGRTMIN)), str(signal.SIGRTMIN + 1)]


@pytest.mark.parametrize(
    ("start", "to"),
    [(["srun"], "steps"), (HORORUN, "steps"), (HORORUN, "batch")],
    ids=["srun", "hororun-steps", "hororun-batch"],
)
def test_trapped_signals_reach_ranks_as_with_srun(slurm: Slurm, tmp_path: Path, start: Sequence[str], to: str) -> None:
    told = [*TRAPPED, *(["INT"] if to == "steps" else [])]  # hororun itself ends the job by SIGINT
    numbers = [int(name) if name.isdigit() else int(signal.Signals[f"SIG{name}"]) for name in told]
    script = tmp_path / "job.sh"
    (tmp_path / "rank.py").write_text(NOTING)
    rank = [sys.executable, "-S", f"{tmp_path}/rank.py", str(tmp_path), *map(str, numbers)]
    script.write_text(f"#!/bin/sh\nexec {' '.join([*start, *rank])}\n")
    number, job = slurm.queue(tmp_path, *LAYOUTS["aabb"], str(script))
    Flags(tmp_path).wait([f"up.{rank}" for rank in range(4)])
    got = [tmp_path / f"got.{rank}" for rank in range(4)]
    for count, name in enumerate(told, 1):
        done = slurm.run("scancel", f"--signal={name}", *(["--batch"] if to == "batch" else []), str(number))
        assert (done.returncode, done.stderr) == (0, "")
        wait_until(
            lambda n=count: [file.exists() and len(file.read_text().split()) >= n for file in got] == [True] * 4,
            f"{name} is with all ranks",
        )
    came = [file.read_text().split() for file in got]
    if start == HORORUN and to == "steps":
        # This Slurm tracks processes by their parents, and then signals all of a step, an agent's ranks among them.
        came[2:] = [[number for number, _ in groupby(each)] for each in came[2:]]
    assert came == [[str(each) for each in numbers]] * 4
    slurm.run("scancel", str(number))
    assert slurm.finish(number, job).state == "CANCELLED"


@pytest.mark.parametrize("start", [["srun"], HORORUN], ids=["srun", "hororun"])
def test_scancel_leaves_nothing(slurm: Slurm, tmp_path: Path, start: Sequence[str]) -> None:
    cancel(slurm, tmp_path, start, {})


def test_scancel_leaves_nothing_of_mpirun(slurm: Slurm, mpi: Mpi, tmp_path: Path) -> None:
    cancel(slurm, tmp_path, [mpi.starter], mpi.environment)


ROOT = Path(__file__).parents[2]
BATCH = ROOT / "examples" / "batch"
VENV = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


@pytest.mark.parametrize("start", ["", "hororun"])
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
