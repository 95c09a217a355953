"""The commands for mpirun of each family and for jsrun, as text."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from horo.runner.config import Job, JobError, Mpi, OutputOptions, Ssh
from horo.runner.hosts import HostSpec
from horo.runner.start.mpirun import (
    Family,
    Mpirun,
    family_of,
    forwarded_names,
    jsrun_command,
    mpirun_command,
    mpirun_variables,
)

HOSTS = (HostSpec("h1", slots=2), HostSpec("h2", slots=2))
JOB = Job(size=4, command=("python", "train.py"), hosts=HOSTS, launcher="mpi")
TWO = {"h1": 2, "h2": 2}
ALL = list(Family)


def command(family: Family, job: Job = JOB, counts: dict[str, int] = TWO, root: bool = False) -> str:
    words = mpirun_command(job, Mpirun("/m/mpirun", family), counts, ["A", "B"], root=root)
    return shlex.join(words)


@pytest.mark.parametrize(
    ("version", "family"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n", Family.OPEN_MPI_5),
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to x\n", Family.OPEN_MPI_4),
        ("mpirun.openmpi (OpenRTE) 4.1.4\n\nReport bugs to x\n", Family.OPEN_MPI_4),
        ("mpirun (IBM Spectrum MPI) 10.4.0.6rtm4\n", Family.SPECTRUM),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", Family.MPICH),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)\n", Family.INTEL),
    ],
)
def test_a_family_is_known_by_what_its_version_says(version: str, family: Family) -> None:
    assert family_of("/m/mpirun", version) is family


@pytest.mark.parametrize(("version", "said"), [("", "nothing"), ("\nLAM 7.1\nx\n", "LAM 7.1")])
def test_an_unknown_mpirun_is_quoted(version: str, said: str) -> None:
    with pytest.raises(JobError, match=f"/m/mpirun is of no kind that hororun knows.*says: {said}") as error:
        family_of("/m/mpirun", version)
    assert error.value.code == 78


OPEN = "/m/mpirun -np 4 -H h1:2,h2:2 --bind-to none --map-by slot"
PLAIN = {
    Family.OPEN_MPI_5: f"{OPEN} --output tag -x A -x B python train.py",
    Family.OPEN_MPI_4: f"{OPEN} --tag-output -x A -x B python train.py",
    Family.SPECTRUM: f"{OPEN} --tag-output -x A -x B python train.py",
    Family.MPICH: "/m/mpirun -np 4 -hosts h1:2,h2:2 -bind-to none -prepend-rank -genvlist A,B python train.py",
    Family.INTEL: "/m/mpirun -prepend-rank -genvlist A,B -n 4 -ppn 2 -hosts h1,h2 python train.py",
}


@pytest.mark.parametrize("family", ALL)
def test_a_plain_job(family: Family) -> None:
    assert command(family) == PLAIN[family]


def test_unequal_hosts_are_told_to_intel_one_by_one() -> None:
    job = replace(JOB, size=3)
    expected = "/m/mpirun -prepend-rank -genvlist A,B -n 2 -host h1 python train.py : -n 1 -host h2 python train.py"
    assert command(Family.INTEL, job, {"h1": 2, "h2": 1}) == expected
    assert "-hosts h1:2,h2:1" in command(Family.MPICH, job, {"h1": 2, "h2": 1})
    with pytest.raises(JobError, match="':'"):
        command(Family.INTEL, replace(job, command=("a", ":", "b")), {"h1": 2, "h2": 1})


FULL = replace(
    JOB,
    interfaces=("eth0",),
    ssh=Ssh("rsh", 2222, "/k", ("-v",)),
    mpi=Mpi(arguments=("--more", "1"), binding=("--bind", "core")),
    output=OutputOptions(prefix=False, directory="out"),
)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (
            Family.OPEN_MPI_5,
            "/m/mpirun --allow-run-as-root -np 4 -H h1:2,h2:2 --bind core --prtemca plm_ssh_agent rsh --prtemca "
            "plm_ssh_args '-p 2222 -i /k -v' --mca btl_tcp_if_include eth0 --prtemca prte_if_include eth0 --output "
            "file=out/rank -x A -x B --more 1 python train.py",
        ),
        (
            Family.OPEN_MPI_4,
            "/m/mpirun --allow-run-as-root -np 4 -H h1:2,h2:2 --bind core --mca plm_rsh_agent rsh --mca plm_rsh_args "
            "'-p 2222 -i /k -v' --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 --output-filename out "
            "-x A -x B --more 1 python train.py",
        ),
        (
            Family.MPICH,
            "/m/mpirun -np 4 -hosts h1:2,h2:2 --bind core -launcher ssh -launcher-exec rsh -iface eth0 "
            "-outfile-pattern out/rank.%r.out -errfile-pattern out/rank.%r.err -genvlist A,B --more 1 python train.py",
        ),
        (
            Family.INTEL,
            "/m/mpirun -launcher ssh -launcher-exec rsh -iface eth0 -outfile-pattern out/rank.%r.out -errfile-pattern "
            "out/rank.%r.err -genvlist A,B --bind core -n 4 -ppn 2 -hosts h1,h2 --more 1 python train.py",
        ),
    ],
)
def test_everything_that_can_be_said(family: Family, expected: str) -> None:
    assert command(family, FULL, root=True) == expected


def test_what_only_variables_say() -> None:
    assert mpirun_variables(FULL, Family.MPICH) == {"HYDRA_LAUNCHER_EXTRA_ARGS": "-p 2222 -i /k -v"}
    assert mpirun_variables(FULL, Family.INTEL) == {"I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "-p 2222 -i /k -v"}
    assert mpirun_variables(JOB, Family.INTEL) == {"I_MPI_PIN": "0"}
    assert mpirun_variables(FULL, Family.OPEN_MPI_5) == mpirun_variables(JOB, Family.MPICH) == {}
    assert "MPICH_*" in forwarded_names(Family.MPICH)
    assert forwarded_names(Family.OPEN_MPI_4) == ("MPI4PY_*",)


def test_time_stamps_where_they_exist() -> None:
    job = replace(JOB, output=OutputOptions(timestamp=True))
    assert "--output tag,timestamp " in command(Family.OPEN_MPI_5, job)
    assert "--tag-output --timestamp-output " in command(Family.OPEN_MPI_4, job)
    assert "-prepend-timestamp " in command(Family.INTEL, job)
    with pytest.raises(JobError, match="--prefix-timestamp"):
        command(Family.MPICH, job)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"hosts": (HostSpec("h1", user="me"),)}, "no user and no port .* h1"),
        ({"hosts": (HostSpec("h1", port=23),)}, "no user and no port .* h1"),
        ({"hosts": (HostSpec("fd00::1"),)}, "fd00::1 is neither"),
        ({"ssh": Ssh(identity_file="/a b")}, "cuts arguments for ssh at spaces, and '/a b'"),
    ],
)
@pytest.mark.parametrize("family", ALL)
def test_what_no_mpirun_understands_is_refused_by_name(family: Family, changed: dict[str, object], fault: str) -> None:
    with pytest.raises(JobError, match=fault):
        command(family, replace(JOB, **changed))  # type: ignore[arg-type]


def test_hydra_takes_one_interface() -> None:
    job = replace(JOB, interfaces=("e0", "e1"))
    assert "--mca btl_tcp_if_include e0,e1" in command(Family.OPEN_MPI_4, job)
    for family in (Family.MPICH, Family.INTEL):
        with pytest.raises(JobError, match="--network-interfaces e0,e1"):
            command(family, job)


def test_jsrun_gives_each_host_whole_to_its_ranks() -> None:
    job = replace(JOB, launcher="jsrun")
    rest = "--cpu_per_rs ALL_CPUS --gpu_per_rs ALL_GPUS --bind none --stdio_mode prepended python train.py"
    assert shlex.join(jsrun_command(job)) == f"jsrun --nrs 2 --rs_per_host 1 --tasks_per_rs 2 {rest}"
    assert shlex.join(jsrun_command(replace(job, size=1))) == f"jsrun --nrs 1 --rs_per_host 1 --tasks_per_rs 1 {rest}"
    with pytest.raises(JobError, match=r"-np 3: .* a multiple of 2"):
        jsrun_command(replace(job, size=3))


def test_jsrun_is_told_what_it_has_words_for() -> None:
    job = replace(
        JOB,
        launcher="jsrun",
        mpi=Mpi(arguments=("-gpu",), binding=("-b", "rs"), tcp=True),
        output=OutputOptions(directory="o"),
    )
    assert shlex.join(jsrun_command(job)).endswith(
        "-b rs --stdio_stdout o/stdout --stdio_stderr o/stderr --smpiargs '-tcp -gpu' python train.py"
    )
