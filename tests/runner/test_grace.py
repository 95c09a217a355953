"""The time between SIGTERM and SIGKILL: how long it is, and what is said when it was too short."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from horo.runner.cli import parse

from jobs import Flags, Hororun, wait_until

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
