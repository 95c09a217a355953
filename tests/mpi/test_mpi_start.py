"""The start and end of jobs under a real mpirun: ranks, sub-jobs, threads, wrong settings; who goes ends the others."""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from doubles import CUDA, build_double

_DEADLINE_S = 100.0
_TESTS = str(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True)
class Ended:
    """What a job left."""

    code: int
    output: str
    errors: str

    @property
    def lines(self) -> list[str]:
        """Of the output, sorted: ranks write in any order."""
        return sorted(self.output.splitlines())


def why_not() -> str | None:
    """Why no job can be started from here; None if it can."""
    if not os.environ.get("MPI4PY_LIBMPI") or shutil.which("mpirun") is None:
        return "no MPI is chosen: `make test-mpi` runs these tests under one after the other"
    if any(os.environ.get(name) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")):
        return "this process is a rank itself"
    return None


@dataclass(frozen=True)
class MpiJobs:
    """Starts scripts under the MPI of the environment."""

    folder: Path

    def run(
        self, size: int, script: str, *arguments: str, environ: Mapping[str, str] | None = None, goes_on: bool = False
    ) -> Ended:
        """The end of ``mpirun -n size python script arguments``; a job that does not end in time fails the test.

        ``size`` 0: without mpirun. ``goes_on``: where it can, mpirun lets the others go on when a rank ends early.
        """
        more = []
        if goes_on:
            version = ["mpirun", "--version"]
            told = subprocess.run(version, capture_output=True, text=True, check=True, timeout=_DEADLINE_S).stdout
            more = ["-disable-auto-cleanup"] if "HYDRA" in told else []  # else it kills them and drops what they say
        launcher = ["mpirun", *more, "-n", str(size)] if size else []
        path = self.folder / "script.py"
        path.write_text(textwrap.dedent(script), encoding="utf-8")
        # Unbuffered, a line and its end are two writes, and mpirun may put the words of another rank between them.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        own = {
            "OMP_NUM_THREADS": "1", "HORO_START_TIMEOUT": "60", "TMPDIR": str(self.folder),
            "PYTHONPATH": os.pathsep.join(filter(None, [_TESTS, os.environ.get("PYTHONPATH")])), **(environ or {}),
        }  # fmt: skip
        command = [*launcher, sys.executable, str(path), *arguments]
        options = {"env": {**inherited, **own}, "stdin": subprocess.DEVNULL, "timeout": _DEADLINE_S}
        try:
            done = subprocess.run(command, capture_output=True, check=False, **options)
        except subprocess.TimeoutExpired as late:
            said = [text.decode() for text in (late.stdout, late.stderr) if text]
            pytest.fail("\n".join(["the job did not end in time", *said]))
        # Some launchers put NUL bytes into their own messages.
        texts = [text.decode("utf-8", "replace").replace("\0", "") for text in (done.stdout, done.stderr)]
        return Ended(done.returncode, *texts)


@pytest.fixture
def mpi_jobs(tmp_path: Path) -> MpiJobs:
    return MpiJobs(tmp_path)


pytestmark = [pytest.mark.skipif(why_not() is not None, reason=str(why_not())), pytest.mark.timeout(150)]

HEAD = """
import os, sys
from plain_rank import Rank

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

def start(comm=None):
    rank = Rank()
    rank.start(comm)
    rank.allreduce("first")
    return rank
"""


def test_rank_and_size_are_mpis_as_often_as_the_job_starts(mpi_jobs: MpiJobs) -> None:
    script = """
import psutil
for again in range(3):
    rank = start()
    job = rank.job
    listening = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    names = [thread.name for thread in __import__("threading").enumerate() if thread.name.startswith("horo")]
    assert sorted(names) == ["horo log"]  # which listen to nobody
    from mpi4py import MPI
    assert (job.rank, job.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    own = [c for c in listening if "horo" in str(c)]
    say(job.rank, job.size, job.local_rank, job.local_size, len(own), os.environ.get("HOROVOD_RANK"))
    rank.close()
"""
    ended = mpi_jobs.run(3, HEAD + script)
    assert ended.code == 0, ended.errors
    assert ended.lines == [f"{rank} 3 {rank} 3 0 None" for rank in range(3) for _ in range(3)]


def test_a_script_may_use_mpi_too_and_finalize_it_itself(mpi_jobs: MpiJobs) -> None:
    script = """
        import os
        from mpi4py import MPI
        os.environ["HORO_HOST_ID"] = str(MPI.COMM_WORLD.rank)
        import torch, horo.torch as hvd
        total = MPI.COMM_WORLD.allreduce(1)
        hvd.init()
        handle = hvd.allreduce_async(torch.ones(1000), op=hvd.Sum, name="x")
        total += MPI.COMM_WORLD.allreduce(1)
        total += hvd.synchronize(handle).sum().item()
        print(total, hvd.mpi_enabled(), hvd.mpi_built(), hvd.mpi_threads_supported())
        MPI.Finalize()
        try:
            hvd.allreduce(torch.ones(2), name="y")
        except ValueError as error:
            print(type(error).__name__)
        """
    ended = mpi_jobs.run(2, script)
    assert ended.code == 0, ended.errors
    assert ended.lines == ["2004.0 True True True"] * 2 + ["NotInitializedError"] * 2


def test_parts_of_the_world_are_jobs_of_their_own(mpi_jobs: MpiJobs) -> None:
    script = """
from mpi4py import MPI
world = MPI.COMM_WORLD
half = world.Split(world.rank % 2, -world.rank)
for again in range(2):
    rank = start(half)
    say("half", world.rank, rank.job.rank, rank.job.size)
    rank.close()
rank = start([3, 0] if world.rank in {0, 3} else [1, 2])
say("list", world.rank, rank.job.rank, rank.job.size)
rank.close()
try:
    start([rank for rank in range(4) if rank != world.rank])
except ValueError as error:
    say("told", str(error).split(": ")[1])
"""
    ended = mpi_jobs.run(4, HEAD + script)
    assert ended.code == 0, ended.errors
    halves = [f"half {rank} {1 - rank // 2} 2" for rank in range(4) for _ in range(2)]
    lists = ["list 0 1 2", "list 1 0 2", "list 2 1 2", "list 3 0 2"]
    told = [
        f"told this process is rank {rank}, which is not in the list, so it must not call init()" for rank in range(4)
    ]
    assert ended.lines == [*halves, *lists, *told]


TWO_HOSTS = """
import os, sys
import mpi4py
mpi4py.rc.thread_level = sys.argv[1]
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
os.environ["HORO_HOST_ID"] = str(rank % 2)
from horo.bootstrap import job as job_module
data_links = []
build = job_module.setup_of
def watched(*arguments, **named):
    data_links.append(sum(link >= 0 for link in named["data"]))
    return build(*arguments, **named)
job_module.setup_of = watched
from plain_rank import Rank
own = Rank()
own.start()
job, sums = own.job, own.allreduce("x", 100_000)
print(rank, job.local_rank, job.cross_rank, job.cross_size, *sums, data_links[0])
"""


@pytest.mark.parametrize(("level", "transport"), [("multiple", "auto"), ("multiple", "tcp"), ("serialized", "auto")])
def test_data_between_hosts_travels_by_mpi_or_tcp(mpi_jobs: MpiJobs, level: str, transport: str) -> None:
    ended = mpi_jobs.run(3, TWO_HOSTS, level, environ={"HORO_TRANSPORT": transport})
    assert ended.code == 0, ended.errors
    places = [(0, 0, 2), (0, 1, 2), (1, 0, 1)]
    sockets = 0 if (level, transport) == ("multiple", "auto") else 1
    assert ended.lines == [
        f"{rank} {local} {cross} {across} 6.0 6.0 {sockets if rank < 2 else 0}"
        for rank, (local, cross, across) in enumerate(places)
    ]
    warned = "data between hosts travels by TCP, not by" in ended.errors
    assert warned == (level == "serialized")


def test_mpi_on_threads_that_it_does_not_allow_is_told(mpi_jobs: MpiJobs) -> None:
    ended = mpi_jobs.run(2, TWO_HOSTS, "serialized", environ={"HORO_TRANSPORT": "mpi"})
    assert ended.code != 0
    assert "HORO_TRANSPORT=mpi, but " in ended.errors
    assert "runs with MPI_THREAD_SERIALIZED" in ended.errors
    assert "mpi4py.rc.thread_level = 'multiple'" in ended.errors


def test_an_mpi_that_its_launcher_does_not_know_or_that_is_not_there_is_one_sentence(mpi_jobs: MpiJobs) -> None:
    ended = mpi_jobs.run(0, HEAD + "start()", environ={"OMPI_COMM_WORLD_SIZE": "4"})
    assert ended.code == 1
    assert "OMPI_COMM_WORLD_SIZE=4, but to mpi4py's MPI (" in ended.errors
    assert "this is process 0 of 1: the job was started by the mpirun of another MPI" in ended.errors
    ended = mpi_jobs.run(2, HEAD + "start()", environ={"MPI4PY_LIBMPI": "/no/libmpi.so"})
    assert ended.code != 0
    assert "mpi4py is installed but finds no MPI library" in ended.errors
    assert "/no/libmpi.so" in ended.errors


def test_a_rank_that_does_not_come_is_told_in_time(mpi_jobs: MpiJobs) -> None:
    script = """
        from mpi4py import MPI
        from horo.bootstrap.job import start
        if MPI.COMM_WORLD.rank == 0:
            start()
        else:
            MPI.COMM_WORLD.recv(source=0, tag=7)
        """
    ended = mpi_jobs.run(2, script, environ={"HORO_START_TIMEOUT": "1"})
    assert ended.code != 0
    assert "not all 2 ranks of the communicator came within 1 s (HORO_START_TIMEOUT)" in ended.errors


def test_forked_workers_under_mpi_neither_hang_nor_disturb(mpi_jobs: MpiJobs) -> None:
    script = """
        import os, sys
        from mpi4py import MPI
        os.environ["HORO_HOST_ID"] = str(MPI.COMM_WORLD.rank)
        import torch, horo.torch as hvd
        from torch.utils.data import DataLoader
        hvd.init()
        loader = DataLoader(range(8), batch_size=2, num_workers=2, multiprocessing_context="fork")
        total = sum(hvd.allreduce(batch.float(), op=hvd.Sum).sum().item() for batch in loader)
        child = os.fork()
        if child == 0:
            try:
                hvd.allreduce(torch.ones(1), name="child")
            except ValueError as error:
                print("child", str(error).split(": ")[1][:31], flush=True)
            os._exit(3)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(total, code, hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after").item(), flush=True)
        """
    ended = mpi_jobs.run(2, script)
    assert ended.code == 0, ended.errors
    assert ended.lines == ["56.0 3 2.0"] * 2 + ["child this process was forked from ra"] * 2


def test_ranks_that_wait_for_one_another_are_told(mpi_jobs: MpiJobs) -> None:
    script = """
from horo.errors import DeadlockError
from mpi4py import MPI
os.environ["HORO_HOST_ID"] = str(MPI.COMM_WORLD.rank)
rank = start()
try:
    rank.allreduce("own" if rank.job.rank == 1 else "other")
except DeadlockError as error:
    say(str(error).partition(" (")[0])
rank.close()
"""
    environ = {"HORO_TRANSPORT": "mpi", "HORO_DEADLOCK_TIME_SECONDS": "0.8"}
    ended = mpi_jobs.run(3, HEAD + script, environ=environ)
    assert ended.lines == ["ranks 0, 2 wait for 'other'"] * 3, ended.errors


GPU_SCRIPT = """
import os, sys
os.environ["HORO_HOST_ID"] = "host " + os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
import gpu_checks, gpu_double
import horo.torch as hvd
hvd.init()
gpu = gpu_double.load(sys.argv[1])
for on_gpu in ((0, 1), (1,)):
    gpu_checks.reductions(gpu, on_gpu)
    gpu_checks.moves(gpu, on_gpu)
sys.stdout.write(hvd.config()["gpu_operations"] + " done\\n")
hvd.shutdown()
"""


def test_tensors_on_gpus_are_staged_on_their_way_by_mpi(mpi_jobs: MpiJobs) -> None:
    """It says what Horovod says of a CUDA-aware MPI."""
    double = build_double(CUDA, mpi_jobs.folder / "double", DELAYS=20)
    environ = {"HORO_TRANSPORT": "mpi", "HOROVOD_GPU_OPERATIONS": "MPI"}
    ended = mpi_jobs.run(2, GPU_SCRIPT, str(double), environ=environ)
    assert (ended.code, ended.lines) == (0, ["mpi done"] * 2), ended.errors


SCRIPT = """
import os, signal, sys, threading, time
if os.environ.get("HORO_TRANSPORT") == "mpi":
    os.environ["HORO_HOST_ID"] = "host " + os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
from horo.errors import HorovodInternalError, StalledError
from plain_rank import Rank
rank = Rank()
number, size = rank.start()
rank.allreduce("x", 100_000)
mode = sys.argv[1]
if mode == "stop":
    rank.allreduce("last")
    sys.exit(75)
if number == 1:
    if mode == "thread":
        thread = threading.Thread(target=lambda: rank.allreduce("x") / 0)
        thread.start()
        thread.join()
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode.startswith("raise"):
        raise ValueError("my own fault")
    if mode == "exit":
        sys.exit(7)
elif mode == "thread":
    rank.allreduce("x")
if mode == "raise during MPI":
    from mpi4py import MPI
    MPI.COMM_WORLD.Barrier()
if mode == "lost and caught":
    if number == 1:
        os._exit(0)
    try:
        rank.allreduce("y")
    except HorovodInternalError:
        rank.close()
        print("caught", flush=True)
        sys.exit(0)
if mode == "stalled":
    while number == 1 and rank.job.context.health() is None:
        time.sleep(0.01)
    try:
        rank.allreduce("y")
    except StalledError:
        rank.close()
        rank.start()
rank.allreduce("y")
print("done", flush=True)
"""


TRANSPORTS = pytest.mark.parametrize("transport", ["auto", "mpi"])


@TRANSPORTS
@pytest.mark.parametrize("mode", ["well", "thread"])
def test_a_job_that_is_done_ends_with_0(mpi_jobs: MpiJobs, mode: str, transport: str) -> None:
    """Also where mpi4py finalizes MPI before horo ends, and where a thread has ended with an error."""
    ended = mpi_jobs.run(3, SCRIPT, mode, environ={"HORO_TRANSPORT": transport})
    assert (ended.code, ended.lines) == (0, ["done"] * 3), ended.errors
    assert ("TypeError" in ended.errors) == (mode == "thread")


def test_a_job_whose_ranks_all_end_with_a_code_has_that(mpi_jobs: MpiJobs) -> None:
    assert mpi_jobs.run(2, SCRIPT, "stop").code == 75


@pytest.mark.parametrize("mode", ["raise", "raise during MPI", "exit"])
def test_a_rank_that_ends_early_ends_the_job_and_is_seen(mpi_jobs: MpiJobs, mode: str) -> None:
    ended = mpi_jobs.run(3, SCRIPT, mode)
    assert ended.code != 0
    assert mode == "exit" or "ValueError: my own fault" in ended.errors
    assert "done" not in ended.output


@TRANSPORTS
def test_a_killed_rank_ends_the_job_and_is_named(mpi_jobs: MpiJobs, transport: str) -> None:
    ended = mpi_jobs.run(3, SCRIPT, "kill", environ={"HORO_TRANSPORT": transport})
    assert ended.code != 0
    told = ended.errors + ended.output
    # mpirun may be faster than the other ranks; then it names the rank in its own words.
    by_horo = "rank 1 (" in told and "its process ended without shutting horo down" in told
    assert by_horo or "signal 9" in told.lower() or "exit code: 9" in told.lower() or "KILLED BY SIGNAL: 9" in told, (
        told
    )
    assert "done" not in ended.output


def test_a_loss_that_the_script_survives_still_ends_the_job_with_the_culprit(mpi_jobs: MpiJobs) -> None:
    ended = mpi_jobs.run(2, SCRIPT, "lost and caught", goes_on=True)
    assert ended.code != 0
    told = ended.errors + ended.output
    assert "rank 1 (" in told or "before calling" in told or "without calling" in told, told


def test_a_job_that_all_ranks_have_begun_again_ends_with_0(mpi_jobs: MpiJobs) -> None:
    """None of them was lost to MPI: one was late, and the others have given it up."""
    environ = {"HORO_STALL_CHECK_TIME_SECONDS": "0.5", "HORO_STALL_SHUTDOWN_TIME_SECONDS": "1"}
    ended = mpi_jobs.run(2, SCRIPT, "stalled", environ=environ)
    assert (ended.code, ended.lines) == (0, ["done"] * 2), ended.errors
    assert "the group ended: stalled, rank 1" in ended.errors
