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


ME, PORT = (HostSpec("a", user="me"),), (HostSpec("a", port=22),)
CHOSEN = [
    ("auto", LOCAL, None, True, "ssh"),
    ("auto", HOSTS, SLURM, True, "slurm"),
    ("auto", HOSTS, SLURM, False, "ssh"),
    ("auto", HOSTS[1:], SLURM, True, "slurm"),
    ("auto", LOCAL, SLURM, True, "slurm"),
    ("auto", (HostSpec("c"),), SLURM, True, "ssh"),
    ("auto", ME, SLURM, True, "ssh"),
    ("auto", PORT, SLURM, True, "ssh"),
    ("auto", HOSTS, LSF, True, "jsrun"),
    ("auto", HOSTS, LSF, False, "ssh"),
    ("auto", HOSTS[1:], LSF, True, "ssh"),
    ("auto", HOSTS, PBS, True, "ssh"),
    ("ssh", HOSTS, SLURM, True, "ssh"),
    ("mpi", HOSTS, SLURM, True, "mpi"),
    ("slurm", HOSTS, None, True, "this is no Slurm job"),
    ("slurm", ME, SLURM, True, "host a is named with a user or a port"),
    ("jsrun", HOSTS, SLURM, True, "this is no LSF job"),
    ("jsrun", HOSTS[1:], LSF, True, "leave out -H"),
    ("jsrun", HOSTS, LSF, False, "there is no jsrun in PATH"),
]
"""What is asked for, the hosts, the batch job, whether its program is there, and what is chosen or said."""


# The cases have numbers, since pytest-mpi skips what is called just "mpi".
@pytest.mark.parametrize(("asked", "hosts", "allocation", "there", "result"), CHOSEN, ids=range(len(CHOSEN)))
def test_a_launcher_is_chosen_or_refused(
    asked: str, hosts: tuple[HostSpec, ...], allocation: Allocation | None, there: bool, result: str
) -> None:
    which = anything if there else nothing
    if " " in result:
        with pytest.raises(JobError, match=result):
            choose_launcher(asked, hosts, allocation, which)
    else:
        assert choose_launcher(asked, hosts, allocation, which) == result


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
