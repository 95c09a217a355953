"""The time between SIGTERM and SIGKILL; and jobs that are stopped for a while, as `scontrol suspend` does."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from jobs import Flags, Hororun, Launched, wait_until

from horo.runner.cli import parse
from horo.runner.processes import send_signal

BATCH = [
    {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "h1", "SLURM_TASKS_PER_NODE": "2"},
    {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "h1 2"},
    {"PBS_JOBID": "1", "PBS_NODEFILE": "{file}"},
]
STUBBORN = "trap '' TERM; flag up; while :; do sleep 0.1; done"


def shell(script: str, flags: Flags) -> list[str]:
    return ["--", "sh", "-c", f"flag() {{ : > {flags.folder}/$1.$HOROVOD_RANK; }}; {script}"]


def grace_s(line: str) -> float:
    job = parse(line.split())
    assert job is not None
    return job.grace_s


@pytest.mark.parametrize("environment", BATCH, ids=["slurm", "lsf", "pbs"])
@pytest.mark.parametrize("where", ["", "-H h1:2 "])
def test_it_is_longer_in_batch_jobs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: dict[str, str], where: str
) -> None:
    assert grace_s("-np 2 -H h1:2 cmd") == 5
    (tmp_path / "nodes").write_text("h1\nh1\n")
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(file=tmp_path / "nodes"))
    assert grace_s(f"-np 2 {where}cmd") == 25
    assert grace_s(f"-np 2 {where}--grace-seconds 3 cmd") == 3


def test_ranks_that_were_killed_because_it_ran_out_are_named(hororun: Hororun, where: str, flags: Flags) -> None:
    script = f"test $HOROVOD_RANK = 1 && {{ flag up; exec sleep 60; }}; {STUBBORN}"
    job = hororun.start("-np", "3", "--grace-seconds", "1", *shell(script, flags), where=where)
    flags.wait([f"up.{rank}" for rank in range(3)])
    job.process.send_signal(signal.SIGTERM)
    assert job.finish().stderr.splitlines() == [
        "hororun: SIGTERM: ranks 0-2 were ended",
        "hororun: ranks 0,2 did not end within 1 s of SIGTERM and were killed; --grace-seconds gives more",
    ]


def test_on_a_terminal_ctrl_c_tells_which_ranks_are_awaited(hororun: Hororun, where: str, flags: Flags) -> None:
    terminal, end = os.openpty()
    os.set_blocking(terminal, False)
    script = f"test $HOROVOD_RANK = 1 && {{ flag up; exec sleep 600; }}; trap '' INT; {STUBBORN}"
    job = hororun.start("-np", "3", "--grace-seconds", "1000", *shell(script, flags), where=where, stderr=end)
    flags.wait([f"up.{rank}" for rank in range(3)])
    job.process.send_signal(signal.SIGINT)
    said = bytearray()

    def told() -> bool:
        with contextlib.suppress(BlockingIOError):
            said.extend(os.read(terminal, 4096))
        return b"hororun: still waiting for the end of ranks 0,2; Ctrl-C again kills them" in said

    wait_until(told, "the ranks that run are named")
    job.process.send_signal(signal.SIGINT)
    assert job.finish().returncode == 130
    os.close(terminal)
    os.close(end)


LIMIT_S = 10.0
"""Long enough that no process is held up for so long by a busy machine, once it may run."""


def suspend(job: Launched, longer_than_s: float) -> None:
    """Stops all processes of the job for longer than the limit and continues them, hororun last."""
    pids = sorted(job.processes(), key=lambda pid: pid == job.process.pid)
    send_signal(pids, signal.SIGSTOP)  # a sleep of the ranks' scripts may have ended
    begin_s = time.monotonic()
    wait_until(lambda: time.monotonic() - begin_s > longer_than_s, "the limit has passed")
    send_signal(pids, signal.SIGCONT)


def test_a_job_that_was_suspended_for_longer_than_the_host_timeout_goes_on(hororun: Hororun, flags: Flags) -> None:
    script = f"flag up; while ! test -e {flags.folder}/go; do sleep 0.1; done"
    job = hororun.start("-np", "4", "--host-timeout", str(LIMIT_S), *shell(script, flags), where="one:2,two:2")
    flags.wait([f"up.{rank}" for rank in range(4)])
    suspend(job, 1.2 * LIMIT_S)
    (flags.folder / "go").touch()
    done = job.finish()
    assert (done.returncode, done.stderr) == (0, "")


def test_grace_time_is_time_in_which_ranks_could_run(hororun: Hororun, flags: Flags) -> None:
    script = f"trap 'flag term' TERM; flag up; while ! test -e {flags.folder}/go; do sleep 0.1; done; flag saved"
    job = hororun.start("-np", "2", "--grace-seconds", str(LIMIT_S), *shell(script, flags))
    flags.wait(["up.0", "up.1"])
    job.process.send_signal(signal.SIGTERM)
    flags.wait(["term.0", "term.1"])
    suspend(job, 1.2 * LIMIT_S)
    (flags.folder / "go").touch()
    assert job.finish().returncode == 143
    flags.wait(["saved.0", "saved.1"])


def are_stopped(pids: list[int]) -> list[bool]:
    return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T" for pid in pids]


def test_ctrl_z_stops_the_ranks_of_this_host_with_hororun(hororun: Hororun, flags: Flags) -> None:
    script = f"echo $$ > {flags.folder}/pid.$HOROVOD_RANK; flag up; while ! test -e {flags.folder}/go; do :; done"
    job = hororun.start("-np", "2", *shell(script, flags))
    flags.wait(["up.0", "up.1"])
    pids = [job.process.pid, int(flags.read("pid.0")), int(flags.read("pid.1"))]
    job.process.send_signal(signal.SIGTSTP)
    wait_until(lambda: all(are_stopped(pids)), "hororun and both ranks are stopped")
    job.process.send_signal(signal.SIGCONT)
    wait_until(lambda: not any(are_stopped(pids)), "they run again")
    (flags.folder / "go").touch()
    done = job.finish()
    assert (done.returncode, done.stderr) == (0, "")
