"""Elastic training under hororun: the example, the end by SIGTERM, a death in init(), and a call."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from elastic_training import EPOCHS, SAMPLES
from jobs import TORCH_S, Hororun, marked_processes

import horo

TRAINING = str(Path(__file__).with_name("elastic_training.py"))
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "elastic.py")
PATIENCE_S = 4 * TORCH_S


def test_the_example_goes_on_when_a_rank_is_killed(hororun: Hororun, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    job = hororun.start("-np", "2", "--min-np", "1", "--json-report", str(file), EXAMPLE, "--epochs", "12")
    job.said_until("epoch  2/12 on 2 rank(s)")
    victim = max(
        pid for pid, command in marked_processes(job.mark).items() if EXAMPLE in command and "-m" not in command
    )
    os.kill(victim, signal.SIGKILL)
    done = job.finish(PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "epoch 12/12" in done.stdout
    assert "test accuracy: 0.9" in done.stdout
    assert "was killed by SIGKILL" in done.stderr
    report = json.loads(file.read_text())
    first, second, *_ = report["generations"]
    assert (report["exit"]["code"], report["cause"]) == (0, None)
    assert first["workers"] == [0, 1]
    assert first["went"] == [
        {"worker": (set(first["workers"]) - set(second["workers"])).pop(), "why": "killed by SIGKILL"}
    ]
    assert second["steps_lost"] == report["steps_lost"] >= 0 and report["stood_still_s"] >= second["stood_still_s"] > 0
    assert "steps lost" in done.stderr


STEPS = """
import sys, time
import horo.torch as hvd

hvd.init()

@hvd.elastic.run
def train(state):
    end = state.step + int(sys.argv[1])
    while state.step < end:
        if hvd.rank() == 0:
            print("step", state.step, flush=True)
        state.step += 1
        state.commit()
        time.sleep(0.01)

train(hvd.elastic.TorchState(step=0))
"""


def test_sigterm_ends_a_job_at_its_next_commit_and_a_later_one_goes_on(hororun: Hororun, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STEPS)
    kept = ("--elastic-dir", str(tmp_path / "kept"), "--grace-seconds", "60", "--no-prefix")
    words = ("-np", "2", "--min-np", "1", *kept, str(script))
    job = hororun.start(*words, "1000000")
    stdout = job.process.stdout
    assert stdout is not None and stdout.readline() == b"step 0\n"
    job.process.send_signal(signal.SIGTERM)
    last = int(stdout.read().split()[-1])
    done = job.finish(PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "the job has to end within 30 s" in done.stderr
    assert "a job with the same --elastic-dir goes on from it" in done.stderr
    done = hororun.start(*words, "3").finish(PATIENCE_S)
    assert (done.returncode, done.stdout.split()[1::2]) == (0, [str(last + step) for step in (1, 2, 3)]), done.stderr


def test_a_rank_goes_on_alone_when_the_next_rank_0_dies_in_init(hororun: Hororun, tmp_path: Path) -> None:
    plan = {"deaths": {0: (9, "recorded"), 1: (8, "init")}, "every": 4}
    places = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
    words = ("-np", "3", "--min-np", "1", TRAINING, str(tmp_path), json.dumps(plan))
    done = hororun.start(*words, environment=places).finish(PATIENCE_S)
    assert done.returncode == 0, done.stderr
    found = {int(path.suffix[1:]): json.loads(path.read_text()) for path in tmp_path.glob("result.*")}
    assert 2 in found and len({result["digest"] for result in found.values()}) == 1
    for result in found.values():  # of worker 2, and perhaps of newcomers
        assert result["resets"] >= 1  # its state is that of before
        seen = Counter(map(tuple, result["seen"]))
        assert seen == Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES))


def count_to(steps: int) -> tuple[int, int, int]:
    import horo.torch as hvd  # noqa: PLC0415 - in a rank
    from horo.bootstrap.elastic import membership  # noqa: PLC0415

    hvd.init()
    member = membership()

    @hvd.elastic.run
    def train(state: Any) -> int:
        while state.step < steps:
            if member is not None and (member.worker, state.step) == (0, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            state.step += 1
            state.commit()
        return hvd.rank()

    return train(hvd.elastic.TorchState(step=0)), hvd.size(), member.worker if member else -1


def test_a_call_returns_the_results_of_the_last_generation() -> None:
    results = horo.run(count_to, (30,), np=2, min_np=2, max_np=2, options=["--oversubscribe"])
    assert results == [(0, 2, 1), (1, 2, 2)]
