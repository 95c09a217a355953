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


# The names of the cases are spelled out, since pytest-mpi skips what is called just "mpi".
@pytest.mark.parametrize("asked", ["ssh", "mpi"], ids=["by-ssh", "by-mpi"])
def test_what_is_asked_for_is_done(asked: str) -> None:
    assert choose_launcher(asked, HOSTS, SLURM, anything) == asked


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


@pytest.mark.parametrize(
    ("line", "launcher"),
    [
        ("-np 1 cmd", "ssh"),
        ("-np 1 --gloo cmd", "ssh"),
        ("-np 1 --mpi cmd", "mpi"),
        ("-np 1 --launcher mpi cmd", "mpi"),
        ("-np 1 --launcher ssh cmd", "ssh"),
    ],
)
def test_words_for_launchers(line: str, launcher: str) -> None:
    assert parsed(line).launcher == launcher


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


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("--launcher rsh", "rsh"),
        ("--mpi --launcher ssh", "--launcher"),
        ("--mpi --jsrun", "--jsrun"),
        ("--elastic-timeout 3", "--elastic-timeout: an elastic job, which is not in this version of horo"),
        ("--gloo-timeout-seconds soon", "--gloo-timeout-seconds: 'soon' is not a number"),
    ],
)
def test_words_that_cannot_be_are_one_sentence(line: str, fault: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["-np", "1", *line.split(), "cmd"])
    assert end.value.code == 2
    said = capfd.readouterr().err
    assert fault in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("--mpi-args=x", "--mpi-args is for --launcher jsrun and mpi; ranks of this job are started by ssh"),
        ("--binding-args=x", "--binding-args is for"),
        ("--mpirun x", "--mpirun is for --launcher mpi;"),
        ("--tcp", "--tcp is for"),
        (
            "--mpi --host-timeout 3",
            "--host-timeout is for --launcher slurm and ssh; ranks of this job are started by mpi",
        ),
        ("--mpi --remote-python x", "--remote-python is for"),
    ],
)
def test_an_option_without_a_use_is_refused_by_name(line: str, fault: str) -> None:
    with pytest.raises(JobError, match=fault):
        parse(["-np", "1", *line.split(), "cmd"])
