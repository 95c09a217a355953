"""Jobs of mpirun and jsrun: their commands, real ones of Open MPI and MPICH where these are there, and stand-ins."""

import os
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import Flags, Hororun, wait_until

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

BUILD = Path(__file__).parents[2] / "build" / "mpi"


@pytest.fixture(autouse=True)
def no_remote_shell(hororun: Hororun) -> None:
    """It is for the launchers of horo."""
    hororun.remote_shell = ""


@pytest.fixture(params=["openmpi", "mpich"])
def mpirun(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A real mpirun, made by ``make test-mpi``."""
    # What one that was killed leaves makes another one fail that gets its process id.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    path = BUILD / str(request.param) / "bin" / "mpirun"
    if not path.exists():
        pytest.skip(f"there is no {path.relative_to(BUILD.parents[1])}: `make test-mpi` installs it")
    return str(path)


def path_with(folder: Path) -> dict[str, str]:
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


WHO = """
import os
env = os.environ
rank = env.get("OMPI_COMM_WORLD_RANK") or env.get("PMI_RANK")
told = [name for name in ("HORO_RANK", "HOROVOD_RANK", "RANK", "HORO_STORE", "HORO_SECRET") if name in env]
size = env.get("OMPI_COMM_WORLD_SIZE") or env.get("PMI_SIZE")
# In one piece: MPICH passes on pieces.
os.write(1, f"rank {rank} {size} {env['FRESH']} {env['HORO_CYCLE_TIME']} {told}\\n".encode())
"""


def test_ranks_come_up_as_ranks_of_mpi_and_of_nobody_else(hororun: Hororun, mpirun: str) -> None:
    outer = {"HOROVOD_RANK": "5", "HOROVOD_SIZE": "6", "HORO_SECRET": "00" * 32, "RANK": "5"}
    words = ["--mpi", "--mpirun", mpirun, "-np", "2", "--no-prefix", "-x", "FRESH=a b", "--cycle-time-ms", "3"]
    done = hororun.run(*words, sys.executable, "-c", WHO, where="localhost:2", environment=outer)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} 2 a b 3 []" for rank in range(2)]


def test_the_command_has_a_python_before_a_script(hororun: Hororun, fake: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = ["--mpi", "-np", "2", "--dry-run"]
    place: dict[str, object] = {"where": "localhost:2", "environment": path_with(fake), "cwd": tmp_path}
    assert hororun.run(*words, "train.py", **place).stdout.endswith(f" {sys.executable} train.py\n")
    assert hororun.run(*words, "-m", "train", **place).stdout.endswith(f" {sys.executable} -m train\n")
    done = hororun.run(*words, "tarin.py", **place)
    assert (done.returncode, done.stderr) == (
        127,
        f"hororun: there is no script 'tarin.py' on this host in {tmp_path}\n",
    )


def test_the_code_of_a_rank_is_kept(hororun: Hororun, mpirun: str) -> None:
    script = "test ${OMPI_COMM_WORLD_RANK:-$PMI_RANK} = 0 || exit 7"  # a Hydra waits for the others
    done = hororun.run("--mpi", "--mpirun", mpirun, "-np", "2", "--", "sh", "-c", script, where="localhost:2")
    assert done.returncode == 7
    assert "hororun: mpirun exited with code 7\n" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks_whose_variables_are_on_no_command_line(
    hororun: Hororun, mpirun: str, flags: Flags, number: signal.Signals
) -> None:
    script = f": > {flags.folder}/up.${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}; exec sleep 300"
    words = ["--mpi", "--mpirun", mpirun, "-np", "2", "-x", "TOKEN", "--", "sh", "-c", script]
    job = hororun.start(*words, where="localhost:2", environment={"TOKEN": "do-not-show-me"})
    flags.wait(["up.0", "up.1"])
    assert len(job.processes()) >= 4  # hororun, its guard, mpirun, two ranks
    assert job.processes("do-not-show-me") == []
    done = job.end_by(number)
    assert done.returncode == 128 + number
    assert f"hororun: {number.name}: the job was ended\n" in done.stderr


def test_kill_9_of_hororun_leaves_nothing(hororun: Hororun, mpirun: str, flags: Flags) -> None:
    script = (
        f"trap '' TERM INT HUP; : > {flags.folder}/up.${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}; while :; do sleep 0.1; done"
    )
    words = ["--mpi", "--mpirun", mpirun, "-np", "2", "--grace-seconds", "0.2", "--", "sh", "-c", script]
    job = hororun.start(*words, where="localhost:2")
    flags.wait(["up.0", "up.1"])
    job.process.kill()
    job.process.wait()
    job.nothing_is_left()


def test_a_dry_run_shows_the_command_and_starts_nothing(hororun: Hororun, fake: Path, tmp_path: Path) -> None:
    words = ["--mpi", "--dry-run", "-np", "3", "--mpi-args=--mca a b", "-x", "TOKEN=secret", "python", "a b.py"]
    done = hororun.run(*words, where="h1:2,h2:2", environment=path_with(fake))
    assert done.stdout.startswith(f"{fake}/mpirun ")
    assert " -np 3 -H h1:2,h2:1 " in done.stdout
    assert done.stdout.endswith("--mca a b python 'a b.py'\n")
    assert "-x TOKEN " in done.stdout
    assert "secret" not in done.stdout
    assert not (tmp_path / "call").exists()


def test_an_mpirun_killed_by_a_signal_is_128_and_the_signal(hororun: Hororun, fake: Path) -> None:
    done = hororun.run(
        "--mpi", "-np", "1", "--", "sh", "-c", "kill -9 $$", where="localhost:1", environment=path_with(fake)
    )
    assert done.returncode == 137


@pytest.mark.parametrize(("number", "grace_s"), [(signal.SIGTERM, "0.2"), (signal.SIGINT, "1000")])
def test_an_mpirun_that_ignores_sigterm_is_killed_after_grace_time_or_at_a_second_signal(
    hororun: Hororun, fake: Path, flags: Flags, number: signal.Signals, grace_s: str
) -> None:
    script = f"trap ': > {flags.folder}/term' TERM; : > {flags.folder}/up; while :; do sleep 0.05; done"
    words = ["--mpi", "-np", "1", "--grace-seconds", grace_s, "--", "sh", "-c", script]
    job = hororun.start(*words, where="localhost:1", environment=path_with(fake))
    flags.wait(["up"])
    for _ in range(2 if number == signal.SIGINT else 1):
        job.process.send_signal(number)
        flags.wait(["term"])
    assert job.finish().returncode == 128 + number


def test_mpirun_gets_signals_that_users_trap_once(hororun: Hororun, fake: Path, flags: Flags) -> None:
    # A real one passes them on to its ranks, which may be in its process group.
    script = "import os, signal\ndef note(number, _): open(f'" + str(flags.folder)
    script += "/got.{number}.{os.getpid()}', 'x').close()\n"
    script += "for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM): signal.signal(number, note)\n"
    script += f"os.fork()\nopen(f'{flags.folder}/up.{{os.getpid()}}', 'x').close()\nwhile True: signal.pause()"
    words = ["--mpi", "-np", "1", "--grace-seconds", "1000", "--", "sh", "-c", f'exec {sys.executable} -S -c "$CODE"']
    job = hororun.start(*words, where="localhost:1", environment={**path_with(fake), "CODE": script})
    wait_until(lambda: len(list(flags.folder.glob("up.*"))) == 2, "mpirun and its rank are up")
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        job.process.send_signal(number)
        wait_until(lambda n=number: list(flags.folder.glob(f"got.{int(n)}.*")) != [], "mpirun has it")
    assert job.end_by(signal.SIGTERM).returncode == 143
    assert len({got.suffix for got in flags.folder.glob("got.*")}) == 1


def test_a_reader_that_leaves_ends_the_job(hororun: Hororun, fake: Path) -> None:
    words = ["--mpi", "-np", "1", "--", "sh", "-c", "while echo x; do sleep 0.01; done; sleep 300"]
    job = hororun.start(*words, where="localhost:1", environment=path_with(fake))
    assert job.process.stdout is not None
    assert os.read(job.process.stdout.fileno(), 2) == b"x\n"
    job.process.stdout.close()
    wait_until(lambda: job.process.poll() is not None, "hororun ends")
    assert job.process.returncode == 141
    job.nothing_is_left()


@pytest.mark.parametrize(
    ("words", "code", "fact"),
    [
        (["--mpirun", "/no/such/mpirun"], 78, "--mpirun /no/such/mpirun: there is no such program"),
        (["--mpirun", "false"], 78, "false is of no kind that hororun knows"),
        (["--tcp"], 2, "--tcp: only Spectrum MPI"),
    ],
)
def test_what_mpirun_cannot_do_is_told(hororun: Hororun, fake: Path, words: list[str], code: int, fact: str) -> None:
    done = hororun.run("--mpi", "-np", "1", *words, "true", where="localhost:1", environment=path_with(fake))
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert fact in done.stderr


def test_an_mpi_that_is_not_there_or_does_not_say_who_it_is_is_one_sentence(hororun: Hororun, fake: Path) -> None:
    (fake / "mpirun").write_text("#!/bin/sh\nexec sleep 60\n")
    for path, told in (
        ({"PATH": str(fake.parent)}, "there is no mpirun or mpiexec in PATH"),
        (path_with(fake), "has not answered within 0.3 s"),
    ):
        words = ["--mpi", "-np", "1", "--start-timeout", "0.3", "true"]
        done = hororun.run(*words, where="localhost:1", environment=path)
        assert (done.returncode, done.stderr.count("\n")) == (78, 1), done.stderr
        assert told in done.stderr


def test_jsrun_is_taken_in_a_job_of_lsf_that_has_it(hororun: Hororun, tmp_path: Path) -> None:
    jsrun = tmp_path / "jsrun"
    jsrun.write_text('#!/bin/sh\necho "$*"\necho "$DATA $HOROVOD_RANK."\n')
    jsrun.chmod(0o755)
    environment = {
        **path_with(tmp_path), "LSB_JOBID": "1", "CSM_ALLOCATION_ID": "2", "LSB_MCPU_HOSTS": "batch1 1 n1 42 n2 42"
    }  # fmt: skip
    done = hororun.run("-np", "4", "-x", "DATA=d", "train", where=None, environment=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "--nrs 2 --rs_per_host 1 --tasks_per_rs 2 --cpu_per_rs ALL_CPUS --gpu_per_rs ALL_GPUS --bind none "
        "--stdio_mode prepended train\nd .\n"
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


def test_an_unknown_mpirun_is_quoted() -> None:
    for version, said in (("", "nothing"), ("\nLAM 7.1\nx\n", "LAM 7.1")):
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


def test_what_only_variables_say_and_time_stamps_where_they_exist() -> None:
    assert mpirun_variables(FULL, Family.MPICH) == {"HYDRA_LAUNCHER_EXTRA_ARGS": "-p 2222 -i /k -v"}
    assert mpirun_variables(FULL, Family.INTEL) == {"I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "-p 2222 -i /k -v"}
    assert mpirun_variables(JOB, Family.INTEL) == {"I_MPI_PIN": "0"}
    assert mpirun_variables(FULL, Family.OPEN_MPI_5) == mpirun_variables(JOB, Family.MPICH) == {}
    assert "MPICH_*" in forwarded_names(Family.MPICH)
    assert forwarded_names(Family.OPEN_MPI_4) == ("MPI4PY_*",)
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


def test_hydra_takes_one_interface_and_jsrun_what_it_has_words_for() -> None:
    job = replace(JOB, interfaces=("e0", "e1"))
    assert "--mca btl_tcp_if_include e0,e1" in command(Family.OPEN_MPI_4, job)
    for family in (Family.MPICH, Family.INTEL):
        with pytest.raises(JobError, match="--network-interfaces e0,e1"):
            command(family, job)
    job = replace(JOB, launcher="jsrun")
    rest = "--cpu_per_rs ALL_CPUS --gpu_per_rs ALL_GPUS --bind none --stdio_mode prepended python train.py"
    assert shlex.join(jsrun_command(job)) == f"jsrun --nrs 2 --rs_per_host 1 --tasks_per_rs 2 {rest}"
    assert shlex.join(jsrun_command(replace(job, size=1))) == f"jsrun --nrs 1 --rs_per_host 1 --tasks_per_rs 1 {rest}"
    with pytest.raises(JobError, match=r"-np 3: .* a multiple of 2"):
        jsrun_command(replace(job, size=3))
    job = replace(
        JOB,
        launcher="jsrun",
        mpi=Mpi(arguments=("-gpu",), binding=("-b", "rs"), tcp=True),
        output=OutputOptions(directory="o"),
    )
    assert shlex.join(jsrun_command(job)).endswith(
        "-b rs --stdio_stdout o/stdout --stdio_stderr o/stderr --smpiargs '-tcp -gpu' python train.py"
    )
