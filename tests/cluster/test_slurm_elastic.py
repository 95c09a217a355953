"""An elastic job under a real Slurm that loses a host of it."""

import sys
from pathlib import Path

from jobs import TORCH_S, wait_until
from slurm import Slurm

WORKER = str(Path(__file__).parents[1] / "elastic" / "elastic_worker.py")
SCRIPT = f"#!/bin/sh\nexec {sys.executable} -m horo.runner -np 2 --min-np 1 {WORKER} 1000000\n"


def test_ranks_go_on_when_a_host_of_the_job_is_down(slurm: Slurm, tmp_path: Path) -> None:
    first, second = slurm.cluster.hosts
    (tmp_path / "job.sh").write_text(SCRIPT)
    told = {"STOP_FILE": str(tmp_path / "stop")}
    words = ["--no-kill", "--nodes=2", "--ntasks=2", str(tmp_path / "job.sh")]
    number, launched = slurm.queue(tmp_path, *words, environment=told)
    out = tmp_path / f"{number}.out"

    def said(what: str) -> None:
        wait_until(lambda: out.exists() and what in out.read_text(), f"{what!r} in {out}", 0.1, 2 * TORCH_S)

    said("worker 1 is 1 of 2")
    slurm.on(first, ["scontrol", "update", f"NodeName={second.name}", "State=DOWN", "Reason=test"])
    said("worker 0 is 0 of 1")
    said(f"hororun: {second.name} is lost (srun ended with code")
    (tmp_path / "stop").touch()
    ended = slurm.finish(number, launched)
    assert ended.state == "COMPLETED", ended.output
    assert "end 0 " in ended.output, ended.output
    wait_until(slurm.is_idle, "the host is back: ReturnToService=2", 0.1)
