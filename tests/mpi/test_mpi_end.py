"""How a job under a real mpirun ends: every rank that goes takes the others with it, and is named."""

import pytest
from mpi_jobs import MpiJobs, why_not

pytestmark = [pytest.mark.skipif(why_not() is not None, reason=str(why_not())), pytest.mark.timeout(150)]

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
