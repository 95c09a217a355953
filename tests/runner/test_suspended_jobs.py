"""Jobs of which every process is stopped for a while, as `scontrol suspend` does, and continued."""

from __future__ import annotations

import os
import signal
import time

import pytest
from jobs import Flags, Hororun, Launched, wait_until

LIMIT_S = 10.0
"""Long enough that no process is held up for so long by a busy machine, once it may run."""


def suspend(job: Launched, longer_than_s: float) -> None:
    """Stops all processes of the job for longer than the limit and continues them, hororun last."""
    pids = sorted(job.processes(), key=lambda pid: pid == job.process.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    begin_s = time.monotonic()
    wait_until(lambda: time.monotonic() - begin_s > longer_than_s, "the limit has passed")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


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


@pytest.mark.parametrize("where", ["localhost:2", "one:1,two:1"], ids=["direct", "agents"])
def test_grace_time_is_time_in_which_ranks_could_run(hororun: Hororun, where: str, flags: Flags) -> None:
    script = f"trap 'flag term' TERM; flag up; while ! test -e {flags.folder}/go; do sleep 0.1; done; flag saved"
    job = hororun.start("-np", "2", "--grace-seconds", str(LIMIT_S), *shell(script, flags), where=where)
    flags.wait(["up.0", "up.1"])
    job.process.send_signal(signal.SIGTERM)
    flags.wait(["term.0", "term.1"])
    suspend(job, 1.2 * LIMIT_S)
    (flags.folder / "go").touch()
    assert job.finish().returncode == 143
    flags.wait(["saved.0", "saved.1"])
