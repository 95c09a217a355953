"""The start of ranks under a real mpirun: their numbers, sub-jobs, threads, and what a wrong setting says."""

import pytest
from doubles import CUDA, build_double
from mpi_jobs import MpiJobs, why_not

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


def test_an_mpi_that_its_launcher_does_not_know_is_one_sentence(mpi_jobs: MpiJobs) -> None:
    ended = mpi_jobs.run(0, HEAD + "start()", environ={"OMPI_COMM_WORLD_SIZE": "4"})
    assert ended.code == 1
    assert "OMPI_COMM_WORLD_SIZE=4, but to mpi4py's MPI (" in ended.errors
    assert "this is process 0 of 1: the job was started by the mpirun of another MPI" in ended.errors


def test_a_library_that_is_not_there_is_named(mpi_jobs: MpiJobs) -> None:
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
