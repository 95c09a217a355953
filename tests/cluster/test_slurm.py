"""horo under a real Slurm of two hosts."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import pytest
from jobs import Flags, wait_until
from mpis import Mpi
from places import LOSE, PLACE, expected, written
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


def test_srun_starts_tasks_on_both_hosts(slurm: Slurm) -> None:
    a, b = slurm.cluster.hosts
    done = slurm.run("srun", "--ntasks=3", "--ntasks-per-node=2", "sh", "-c", TASK)
    assert (done.returncode, done.stderr) == (0, "")
    nodes = f"{a.name[:-1]}[1-2] 2,1"
    tasks = [(0, a, 0), (1, a, 1), (2, b, 0)]
    assert sorted(done.stdout.splitlines()) == [f"{rank} {host.name} {local} {nodes}" for rank, host, local in tasks]


@pytest.mark.parametrize("layout", LAYOUTS)
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


@pytest.mark.parametrize("layout", ["aabb", "abaa"])
def test_srun_with_mpi(slurm: Slurm, mpi: Mpi, tmp_path: Path, layout: str) -> None:
    command = ["srun", f"--mpi={mpi.under_srun}", *LAYOUTS[layout], *PLACE, str(tmp_path)]
    done = slurm.run(*command, environment=mpi.environment)
    assert done.returncode == 0, done.stderr
    assert written(tmp_path) == expected(layout, slurm.cluster, mpi.library)


def test_mpirun_takes_its_hosts_from_slurm(slurm: Slurm, mpi: Mpi, tmp_path: Path) -> None:
    done = slurm.run("salloc", *LAYOUTS["aaab"], mpi.starter, *PLACE, str(tmp_path), environment=mpi.environment)
    assert done.returncode == 0, done.stderr
    assert written(tmp_path) == expected("aaab", slurm.cluster, mpi.library)


def test_a_process_that_trains_alone_in_a_batch_job_of_several_tasks_is_told_what_to_type(
    slurm: Slurm, tmp_path: Path
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n{' '.join(PLACE)} {tmp_path}\n")
    done = slurm.batch(tmp_path, *LAYOUTS["aabb"], str(script))
    assert done.state == "COMPLETED"
    assert done.output.startswith("horo [0] warning: this process is alone (size 1), but the Slurm job has 4 tasks")
    assert done.output.count("\n") == 1
    script.write_text(f"#!/bin/sh\nsrun --ntasks=1 --nodes=1 {' '.join(PLACE)} {tmp_path}\n")
    assert slurm.batch(tmp_path, *LAYOUTS["aabb"], str(script)).output == ""
    assert "warning" not in slurm.run("salloc", *LAYOUTS["aabb"], *PLACE, str(tmp_path)).stderr


@pytest.mark.parametrize("layout", ["aabb", "aaab"])
def test_hororun_takes_its_hosts_from_slurm_and_needs_no_ssh(slurm: Slurm, tmp_path: Path, layout: str) -> None:
    command = ["salloc", *LAYOUTS[layout], *HORORUN, "--verbose", *PLACE, str(tmp_path)]
    done = slurm.run(*command)
    assert done.returncode == 0, done.stderr
    assert f"{slurm.cluster.hosts[1].name}: srun " in done.stderr
    assert written(tmp_path) == expected(layout, slurm.cluster)


def test_hosts_of_a_slurm_job_can_be_checked(slurm: Slurm) -> None:
    done = slurm.run("salloc", *LAYOUTS["aabb"], *HORORUN, "--check-hosts")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(": ok: ")[0] for line in lines] == [host.name for host in slurm.cluster.hosts]


def test_a_rank_that_is_killed_ends_the_step_and_is_named(slurm: Slurm) -> None:
    done = slurm.run("srun", *LAYOUTS["aabb"], *LOSE, "3")
    assert done.returncode == 137
    b = slurm.cluster.hosts[1].name
    assert done.stderr.count(f"PeerLostError: rank 3 ({b}) is gone") == 3, done.stderr
    assert f"srun: error: {b}: task 3: Killed" in done.stderr


def test_a_rank_that_is_killed_ends_a_step_with_mpi_and_is_named(slurm: Slurm, mpi: Mpi) -> None:
    command = ["srun", f"--mpi={mpi.under_srun}", *LAYOUTS["aabb"], *LOSE, "3"]
    done = slurm.run(*command, environment=mpi.environment)
    assert done.returncode != 0
    b = slurm.cluster.hosts[1].name
    assert re.search(rf"rank 3 \({b}\) is gone|{b}: task 3: Killed", done.stderr), done.stderr


def test_a_rank_that_is_killed_ends_hororun_and_is_named(slurm: Slurm) -> None:
    done = slurm.run("salloc", *LAYOUTS["aabb"], *HORORUN, *LOSE, "3")
    assert done.returncode == 137
    assert f"rank 3 on {slurm.cluster.hosts[1].name} was killed by SIGKILL" in done.stderr


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


def test_a_job_that_slurm_suspends_for_longer_than_the_host_timeout_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    limit_s = 10.0
    flags = Flags(tmp_path)
    task = f": > {tmp_path}/up.$HOROVOD_RANK; while ! test -e {tmp_path}/go; do sleep 0.1; done"
    script = tmp_path / "job.sh"
    script.write_text(f'#!/bin/sh\n{" ".join(HORORUN)} --host-timeout {limit_s} sh -c "$TASK"\n')
    number, job = slurm.queue(tmp_path, *LAYOUTS["aabb"], str(script), environment={"TASK": task})
    flags.wait([f"up.{rank}" for rank in range(4)])
    assert slurm.run("scontrol", "suspend", str(number)).returncode == 0
    begin_s = time.monotonic()
    wait_until(lambda: time.monotonic() - begin_s > 1.2 * limit_s, "the limit has passed")
    assert slurm.facts(number)["JobState"] == "SUSPENDED"
    assert slurm.run("scontrol", "resume", str(number)).returncode == 0
    (tmp_path / "go").touch()
    done = slurm.finish(number, job)
    assert (done.state, done.output) == ("COMPLETED", "")


@pytest.mark.parametrize("to", [["--batch"], []], ids=["batch", "steps"])
def test_a_signal_that_slurm_sends_reaches_the_ranks_of_hororun(slurm: Slurm, tmp_path: Path, to: list[str]) -> None:
    """To the batch script, which hororun has replaced, or to the steps: of these hororun has one, its agent."""
    flags = Flags(tmp_path)
    rank = f"trap ': > {tmp_path}/told.$HOROVOD_RANK; exit 75' USR1; : > {tmp_path}/up.$HOROVOD_RANK"
    script = tmp_path / "job.sh"
    script.write_text(f'#!/bin/sh\nexec {" ".join(HORORUN)} --failure-seconds 30 sh -c "$TASK"\n')
    task = {"TASK": f"{rank}; while :; do sleep 0.1; done"}
    number, job = slurm.queue(tmp_path, *LAYOUTS["aabb"], str(script), environment=task)
    flags.wait([f"up.{rank}" for rank in range(4)])
    assert slurm.run("scancel", "--signal=USR1", *to, str(number)).returncode == 0
    flags.wait([f"told.{rank}" for rank in range(4)])
    done = slurm.finish(number, job)
    assert (done.state, done.exit_code) == ("FAILED", "75:0"), done.output


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
def test_signals_that_users_trap_reach_ranks_as_with_plain_srun(
    slurm: Slurm, tmp_path: Path, start: Sequence[str], to: str
) -> None:
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
