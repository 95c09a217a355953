"""What batch systems say about a job, and which launcher starts its ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from horo.runner.cli import parse
from horo.runner.config import Job, JobError
from horo.runner.hosts import HostSpec
from horo.runner.start.allocation import Allocation, AllocationError, find_allocation
from horo.runner.start.launcher import allocated, choose_launcher

FOLDER = Path(__file__).parent / "allocations"


def recorded(name: str) -> dict[str, str]:
    lines = (FOLDER / f"{name}.env").read_text().splitlines()
    return dict(line.replace("@FOLDER", str(FOLDER)).split("=", 1) for line in lines)


def read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


EXPECTED = {
    "slurm-tasks": ("Slurm", "node1:2 node2:2 node3:2 node07:1"),
    "slurm-gpus": ("Slurm", "gpu3:4 gpu4:4"),
    "slurm-gres": ("Slurm", "gpu1:4 gpu2:4"),
    "slurm-gpus-of-job": ("Slurm", "gpu1:4 gpu2:2"),
    "slurm-salloc-shell": ("Slurm", "node1:2 node2:2"),
    "slurm-pty": ("Slurm", "node5:4"),
    "slurm-old": ("Slurm", "login:1 rack0n01:4 rack0n02:4 rack1n01:4 rack1n02:4"),
    "pbs-pro": ("PBS", "n01.cluster.org:2 n02.cluster.org:2 n03.cluster.org:1"),
    "torque": ("PBS", "c7:2 c4:2"),
    "lsf": ("LSF", "hostA:5 hostB:2"),
    "lsf-hostfile": ("LSF", "hostB:1 hostA:2"),
    "lsf-hosts": ("LSF", "hostC:2 hostD:1"),
    "lsf-csm": ("LSF", "a01n04:42 a01n05:42"),
    "sge": ("SGE", "exec1.site:5 exec2.site:2"),
}


def test_every_recorded_job_has_its_expectation() -> None:
    assert {path.stem for path in FOLDER.glob("*.env")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_hosts_and_slots_of_a_job_are_read(name: str) -> None:
    system, hosts = EXPECTED[name]
    found = find_allocation(recorded(name), read)
    assert found is not None
    assert found.system == system
    assert " ".join(f"{host.name}:{host.slots}" for host in found.hosts) == hosts
    assert re.search(r" (job) \S+ \(.*[A-Z_]+=", found.source)


@pytest.mark.parametrize(
    "environ",
    [{}, {"SLURM_JOB_ID": "1"}, {"SLURM_JOB_NODELIST": "h1"}, {"LSB_JOBID": "1"}, {"PBS_JOBID": "1"}, {"JOB_ID": "1"}],
)
def test_half_of_it_is_no_allocation(environ: dict[str, str]) -> None:
    assert find_allocation(environ, read) is None


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"SLURM_JOB_NODELIST": "node[1-"}, r"SLURM_JOB_NODELIST='node\[1-': .*node\[1-"),
        (
            {"SLURM_JOB_NODELIST": "-oProxyCommand=x", "SLURM_TASKS_PER_NODE": "1"},
            "SLURM_JOB_NODELIST='-oProxyCommand=x'.* no name of a host",
        ),
        ({"SLURM_TASKS_PER_NODE": "2(y3)"}, r"SLURM_TASKS_PER_NODE='2\(y3\)'"),
        ({"SLURM_TASKS_PER_NODE": "2(x3)"}, r"SLURM_TASKS_PER_NODE='2\(x3\)': speaks of 3 hosts, and the job has 4"),
        ({"SLURM_TASKS_PER_NODE": "2(x3),0"}, "a host with 0"),
        (
            {"SLURM_TASKS_PER_NODE": "", "SLURM_JOB_CPUS_PER_NODE": "4"},
            "SLURM_JOB_CPUS_PER_NODE='4': speaks of 1 hosts",
        ),
        (
            {"SLURM_TASKS_PER_NODE": "", "SLURM_JOB_CPUS_PER_NODE": "", "SLURM_CPUS_ON_NODE": ""},
            "neither SLURM_TASKS_PER",
        ),
        ({"SLURM_STEP_ID": "x"}, "SLURM_STEP_ID='x': is no number"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS=4: srun has started 4 copies"),
        ({"SLURM_NTASKS": "", "SLURM_NPROCS": "", "SLURM_GPUS_PER_NODE": "many"}, "SLURM_GPUS_PER_NODE='many'"),
    ],
)
def test_damaged_words_of_slurm_are_named(changed: dict[str, str], fault: str) -> None:
    with pytest.raises(AllocationError, match=fault):
        find_allocation({**recorded("slurm-tasks"), **changed}, read)


@pytest.mark.parametrize(
    ("environ", "fault"),
    [
        ({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a 2 b"}, "LSB_MCPU_HOSTS='a 2 b': is no list of hosts"),
        ({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a two"}, "LSB_MCPU_HOSTS='a two'"),
        ({"LSB_JOBID": "1", "LSB_DJOB_HOSTFILE": "/no/such"}, "LSB_DJOB_HOSTFILE='/no/such': cannot be read: No such"),
        ({"PBS_NODEFILE": "/no/such"}, "PBS_NODEFILE='/no/such': cannot be read: No such file"),
        ({"PE_HOSTFILE": "/no/such"}, "PE_HOSTFILE='/no/such': cannot be read: No such file"),
    ],
)
def test_damaged_words_of_other_systems_are_named(environ: dict[str, str], fault: str) -> None:
    with pytest.raises(AllocationError, match=fault):
        find_allocation(environ, read)


@pytest.mark.parametrize(
    ("variable", "content", "fault"),
    [
        ("PBS_NODEFILE", b"", "names no host"),
        ("PBS_NODEFILE", b"a b\n", "'a b' is no name of a host"),
        ("PBS_NODEFILE", b"\xff\xfe", "is not text"),
        ("PE_HOSTFILE", b"a\n", "its line 'a' is no host with its slots"),
        ("PE_HOSTFILE", b"a 0 q x\n", "its line 'a 0 q x'"),
    ],
)
def test_a_damaged_host_file_is_named_with_its_variable(
    tmp_path: Path, variable: str, content: bytes, fault: str
) -> None:
    (tmp_path / "hosts").write_bytes(content)
    with pytest.raises(AllocationError, match=f"{variable}='{tmp_path}/hosts'.*{fault}"):
        find_allocation({variable: f"{tmp_path}/hosts"}, read)


@pytest.mark.parametrize(("asked", "tasks"), [("3", 3), ("4", None), ("", None)])
def test_a_job_may_ask_for_fewer_tasks_than_it_has_slots(asked: str, tasks: int | None) -> None:
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "h[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
    found = find_allocation({**job, "SLURM_NTASKS": asked}, str)
    assert found is not None
    assert ([host.slots for host in found.hosts], found.tasks) == ([2, 2], tasks)


def test_a_batch_host_is_left_out_only_where_csm_allocates() -> None:
    environ = {**recorded("lsf-csm"), "CSM_ALLOCATION_ID": ""}
    found = find_allocation(environ, read)
    assert found is not None
    assert found.hosts[0] == HostSpec("batch2", slots=1)


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
