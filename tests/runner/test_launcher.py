"""Which launcher starts the ranks when nobody says, and what is refused when somebody does."""

from __future__ import annotations

import pytest

from horo.runner.cli import parse
from horo.runner.config import Job, JobError
from horo.runner.hosts import HostSpec
from horo.runner.start.allocation import Allocation
from horo.runner.start.launcher import allocated, choose_launcher

HOSTS = (HostSpec("a", slots=2), HostSpec("b", slots=2))
SLURM = Allocation("Slurm", HOSTS, "Slurm job 1")
LSF = Allocation("LSF", HOSTS, "LSF job 1")
PBS = Allocation("PBS", HOSTS, "PBS job 1")
LOCAL = (HostSpec("localhost"),)


def anything(name: str) -> str:
    return f"/bin/{name}"


def nothing(_name: str) -> None:
    return None


@pytest.mark.parametrize(
    ("hosts", "allocation", "there", "chosen"),
    [
        (LOCAL, None, True, "ssh"),
        (HOSTS, None, True, "ssh"),
        (HOSTS, SLURM, True, "slurm"),
        (HOSTS, SLURM, False, "ssh"),
        (HOSTS[1:], SLURM, True, "slurm"),
        (LOCAL, SLURM, True, "slurm"),
        ((HostSpec("c"),), SLURM, True, "ssh"),
        ((HostSpec("a", user="me"),), SLURM, True, "ssh"),
        ((HostSpec("a", port=22),), SLURM, True, "ssh"),
        (HOSTS, LSF, True, "jsrun"),
        (HOSTS, LSF, False, "ssh"),
        (HOSTS[1:], LSF, True, "ssh"),
        (HOSTS, PBS, True, "ssh"),
    ],
)
def test_auto(hosts: tuple[HostSpec, ...], allocation: Allocation | None, there: bool, chosen: str) -> None:
    assert choose_launcher("auto", hosts, allocation, anything if there else nothing) == chosen


@pytest.mark.parametrize(
    ("asked", "hosts", "allocation", "there", "fault"),
    [
        ("slurm", HOSTS, None, True, "this is no Slurm job"),
        ("slurm", HOSTS, LSF, True, "this is no Slurm job"),
        ("slurm", (HostSpec("a", user="me"),), SLURM, True, "host a is named with a user or a port"),
        ("jsrun", HOSTS, None, True, "this is no LSF job"),
        ("jsrun", HOSTS, SLURM, True, "this is no LSF job"),
        ("jsrun", HOSTS[1:], LSF, True, "leave out -H"),
        ("jsrun", HOSTS, LSF, False, "there is no jsrun in PATH"),
    ],
)
def test_what_does_not_fit_is_refused(
    asked: str, hosts: tuple[HostSpec, ...], allocation: Allocation | None, there: bool, fault: str
) -> None:
    with pytest.raises(JobError, match=fault):
        choose_launcher(asked, hosts, allocation, anything if there else nothing)


def test_a_damaged_allocation_matters_only_where_it_is_needed() -> None:
    environ = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a[", "SLURM_TASKS_PER_NODE": "1"}
    assert allocated(environ, named=True) is None
    with pytest.raises(JobError, match="SLURM_JOB_NODELIST='a\\['"):
        allocated(environ, named=False)


def parsed(line: str) -> Job:
    job = parse(line.split())
    assert job is not None
    return job


def test_options_for_mpirun_become_part_of_the_job() -> None:
    job = parsed("-np 1 --mpi --mpirun /m --mpi-args=-v --binding-args=--bind-to=core --tcp --dry-run cmd")
    assert (job.mpi.program, job.mpi.arguments, job.mpi.binding) == ("/m", ("-v",), ("--bind-to=core",))
    assert (job.mpi.tcp, job.dry_run) == (True, True)


def test_a_batch_job_gives_hosts_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LSB_JOBID", "5")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "a 2 b 1")
    job = parsed("--launcher ssh cmd")
    assert (job.size, job.hosts) == (3, (HostSpec("a", slots=2), HostSpec("b", slots=1)))
    assert job.hosts_from == "LSF job 5 (LSB_MCPU_HOSTS=a 2 b 1)"
    job = parsed("--launcher ssh -np 2 -H c:2 cmd")
    assert (job.size, job.hosts, job.hosts_from) == (2, (HostSpec("c", slots=2),), "")
