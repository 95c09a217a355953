"""Whole jobs inside a Slurm allocation, with a program in place of srun that runs its command on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jobs import Hororun

SRUN = """#!/bin/sh
# Stands in for srun, as strict about its words as far as hororun is concerned.
test "$1" = --version && {{ echo slurm {version}; exit 0; }}
echo "$*" >> {folder}/calls
env | grep ^S[LR][U]*[UR][RMN]_ | sort > {folder}/environment
test "$SLURM_JOB_ID" = 7 || {{ echo "srun: error: no job" >&2; exit 1; }}
while :; do
    case $1 in
        --nodelist=*) node=${{1#*=}};;
        --nodes=1|--ntasks=1|--overlap|--cpu-bind=none|--mem=0|--mpi=none|--export=ALL|--chdir=/|--quiet) ;;
        -*) echo "srun: unrecognized option '$1'" >&2; exit 1;;
        *) break;;
    esac
    shift
done
{before}
export SLURM_STEP_ID=3 SLURM_STEPID=3 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1 SLURM_STEP_NUM_TASKS=1
export SLURMD_NODENAME=$node SLURM_NODEID=0 SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 SLURM_JOB_NODELIST=one,two
cd / && exec "$@"
"""
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "one,two",
    "SLURM_NTASKS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
}


class Slurm:
    """A job of two hosts, one with two tasks and one with one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**JOB, "PATH": f"{folder}:{os.environ['PATH']}"}
        self.install()

    def install(self, before: str = "", version: str = "22.05.8") -> None:
        path = self.folder / "srun"
        path.write_text(SRUN.format(folder=self.folder, before=before, version=version))
        path.chmod(0o755)

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return sorted(path.read_text().splitlines()) if path.exists() else []


@pytest.fixture
def slurm(hororun: Hororun, tmp_path: Path) -> Slurm:
    hororun.remote_shell = ""
    (tmp_path / "slurm").mkdir()
    return Slurm(tmp_path / "slurm")


def shell(script: str) -> list[str]:
    return ["--", "sh", "-c", script]


def test_hosts_slots_and_srun_are_taken_without_being_asked(hororun: Hororun, slurm: Slurm) -> None:
    script = "echo $HOROVOD_RANK/$HOROVOD_SIZE $HOROVOD_LOCAL_RANK/$HOROVOD_LOCAL_SIZE "
    script += "$HOROVOD_CROSS_RANK/$HOROVOD_CROSS_SIZE $SLURMD_NODENAME"
    done = hororun.run("--no-prefix", *shell(script), where=None, environment=slurm.environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["0/3 0/2 0/2 one", "1/3 1/2 0/1 one", "2/3 0/1 1/2 two"]
    assert ["--nodelist=one" in slurm.calls()[0], "--nodelist=two" in slurm.calls()[1], len(slurm.calls())] == [
        True,
        True,
        2,
    ]


def test_an_allocation_that_makes_no_sense_is_one_sentence_unless_hosts_are_named(
    hororun: Hororun, slurm: Slurm
) -> None:
    environment = {**slurm.environment, "SLURM_TASKS_PER_NODE": "two"}
    done = hororun.run("-np", "1", "true", where=None, environment=environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "SLURM_TASKS_PER_NODE='two'" in done.stderr
    assert hororun.run("-np", "1", "true", where="localhost:1", environment=environment).returncode == 0
    assert slurm.calls() == []


def test_hosts_that_are_named_win(hororun: Hororun, slurm: Slurm) -> None:
    done = hororun.run("-np", "2", *shell("echo $HOROVOD_HOSTNAME"), where="two:2", environment=slurm.environment)
    assert done.stdout == "[0] two\n[1] two\n", done.stderr
    assert len(slurm.calls()) == 1
    ssh = slurm.folder / "ssh"
    ssh.write_text("#!/bin/sh\necho no such host >&2; exit 255\n")
    ssh.chmod(0o755)
    done = hororun.run("-np", "1", "true", where="elsewhere:1", environment=slurm.environment)
    assert done.returncode == 69  # not of the job: ssh was tried
    assert "cannot reach host elsewhere: ssh: no such host" in done.stderr
    assert len(slurm.calls()) == 1


def test_an_option_for_ssh_decides_for_ssh(hororun: Hororun, slurm: Slurm) -> None:
    done = hororun.run("--dry-run", "-p", "2222", "true", where=None, environment=slurm.environment)
    assert "ssh -T" in done.stdout
    done = hororun.run("--launcher", "slurm", "-p", "2222", "true", where=None, environment=slurm.environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "-p is for --launcher mpi and ssh" in done.stderr


def test_a_dry_run_shows_ranks_and_commands_and_starts_nothing(hororun: Hororun, slurm: Slurm) -> None:
    done = hororun.run("--dry-run", "python", "a b.py", where=None, environment=slurm.environment)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("hosts from the Slurm job 7")
    assert lines[1].startswith("ranks 0-1 on one: srun --nodes=1")
    assert lines[2].startswith("rank 2 on two: srun --nodes=1")
    assert lines[3] == "each rank: python 'a b.py'"
    assert slurm.calls() == []


def test_an_srun_that_refuses_is_quoted_and_ends_the_job(hororun: Hororun, slurm: Slurm) -> None:
    said = "srun: error: Unable to create step for job 7: Requested node configuration is not available"
    slurm.install(before=f'test $node = two && {{ echo "{said}" >&2; exit 1; }}')
    done = hororun.run("true", where=None, environment=slurm.environment)
    assert done.returncode == 69
    assert done.stderr == f"hororun: cannot start an agent on host two: srun: {said.removeprefix('srun: error: ')}\n"


def test_a_host_that_does_not_answer_is_named_with_what_to_try(hororun: Hororun, slurm: Slurm) -> None:
    slurm.install(before="test $node = two && exec sleep 60")
    done = hororun.run("--start-timeout", "0.5", "true", where=None, environment=slurm.environment)
    assert done.returncode == 69
    assert "two: try srun --overlap --nodelist=" in done.stderr


def test_an_srun_that_is_not_there_is_named(hororun: Hororun, slurm: Slurm, tmp_path: Path) -> None:
    (slurm.folder / "srun").unlink()
    environment = {**slurm.environment, "PATH": str(tmp_path)}
    done = hororun.run("--launcher", "slurm", "true", where=None, environment=environment)
    assert (done.returncode, done.stderr.count("\n")) == (78, 1)
    assert "srun cannot be started" in done.stderr
