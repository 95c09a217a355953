"""Elastic jobs under a real Slurm that loses a host of one, and puts another one back into the queue."""

import contextlib
import os
import re
import sys
from pathlib import Path

import pytest
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


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "elastic.md"
TRAINING = """
import os
import torch
import horo.torch as hvd

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())

@hvd.elastic.run
def train(state):
    if hvd.rank() == 0:
        print(f"begins at step {state.step} on {hvd.size()}", flush=True)
    is_over = 0
    while not is_over:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit()
        is_over = hvd.allreduce(torch.tensor(int(os.path.exists("stop"))), op=hvd.Max, name="over").item()

train(hvd.elastic.TorchState(model, optimizer, step=0))
"""


@pytest.mark.parametrize(
    "words", [["scancel", "--signal=TERM", "--batch"], ["scontrol", "requeue"]], ids=["time-is-up", "preempted"]
)
def test_a_job_that_is_requeued_goes_on_from_its_last_commit(slurm: Slurm, tmp_path: Path, words: list[str]) -> None:
    """The script of the page, for two ranks. ``--signal=B:TERM@120`` is a signal to the batch script."""
    script = PAGE.read_text().partition("```bash script=requeue\n")[2].partition("```")[0]
    (tmp_path / "job.sh").write_text(script.replace("-np 8 --min-np 4", "-np 2 --min-np 1"))
    (tmp_path / "train.py").write_text(TRAINING)
    told = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    number, launched = slurm.queue(tmp_path, "--ntasks-per-node=1", str(tmp_path / "job.sh"), environment=told)
    first = slurm.cluster.hosts[0]

    def begins() -> list[int]:
        out = tmp_path / f"{number}.out"
        said = out.read_text() if out.exists() else ""
        return [int(step) for step in re.findall(r"begins at step (\d+) on 2", said)]

    wait_until(begins, "the first training", 0.1, 2 * TORCH_S)
    slurm.on(first, [*words, str(number)])

    moved: list[str] = []

    def begins_again() -> bool:
        # Else it begins after two minutes. In the second in which Slurm has killed it, it refuses to begin it.
        with contextlib.suppress(RuntimeError):  # it is not in the queue, or not any more
            if not moved and "JobState=PENDING" in slurm.on(first, ["scontrol", "show", "job", str(number)]):
                moved.append(slurm.on(first, ["scontrol", "update", f"JobId={number}", "StartTime=now+2"]))
        return len(begins()) > 1

    try:
        wait_until(begins_again, "the second training", 0.5, 2 * TORCH_S)
    except AssertionError:
        job = slurm.on(first, ["scontrol", "show", "job", str(number)])
        pytest.fail(f"no second training:\n{(tmp_path / f'{number}.out').read_text()}\n{job}")
    (tmp_path / "stop").touch()
    ended = slurm.finish(number, launched)
    assert ended.state == "COMPLETED", ended.output
    before, *_, after = begins()
    assert before == 0 < after, ended.output
