"""Jobs of which every process is stopped for a while, as `scontrol suspend` does, and continued."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from jobs import Flags, Hororun, Launched, wait_until

from horo.runner.processes import send_signal

LIMIT_S = 10.0
"""Long enough that no process is held up for so long by a busy machine, once it may run."""


def suspend(job: Launched, longer_than_s: float) -> None:
    """Stops all processes of the job for longer than the limit and continues them, hororun last."""
    pids = sorted(job.processes(), key=lambda pid: pid == job.process.pid)
    send_signal(pids, signal.SIGSTOP)  # a sleep of the ranks' scripts may have ended
    begin_s = time.monotonic()
    wait_until(lambda: time.monotonic() - begin_s > longer_than_s, "the limit has passed")
    send_signal(pids, signal.SIGCONT)


def shell(script: str, flags: Flags) -> list[str]:
    return ["--", "sh", "-c", f"flag() {{ : > {flags.folder}/$1.$HOROVOD_RANK; }}; {script}"]


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
