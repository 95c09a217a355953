"""torchrun's restarts: the next attempt goes on from the last commit, which any host may have in its own memory."""

import re
from pathlib import Path

import pytest
from jobs import TORCH_S, run_python

PROGRAM = r"""
import os
import sys
from pathlib import Path

folder, victim = Path(sys.argv[1]), int(sys.argv[2])
os.environ["HORO_ELASTIC_DIR"] = str(folder / f"host of {os.environ['RANK']}")
import torch
import horo.torch as hvd

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

@hvd.elastic.run
def train(state):
    sys.stdout.write(f"rank {hvd.rank()} begins at step {state.step} {resets}\n")  # in one piece
    sys.stdout.flush()
    while state.step < 10:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit()
        if state.step == 5 and hvd.rank() == victim and not (folder / "failed").exists():
            (folder / "failed").touch()
            os._exit(3)

resets = []
state = hvd.elastic.TorchState(model, optimizer, step=0)
state.register_reset_callbacks([lambda: resets.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())])
train(state)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_all_ranks_go_on_from_the_commit_that_one_host_has(tmp_path: Path, victim: int) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    words = [*torchrun, str(tmp_path / "train.py"), str(tmp_path), str(victim)]
    done = run_python("-m", *words, environment={"OMP_NUM_THREADS": "1"}, timeout=2 * TORCH_S)
    assert done.returncode == 0, done.stderr
    begins = sorted(re.findall(r"rank (\d) begins at step (\d+) (.*)", done.stdout))
    first = [("0", "0", "[]"), ("1", "0", "[]")]
    assert all(each in begins for each in first), done.stdout
    later = [each for each in begins if each not in first]
    assert [rank for rank, _, _ in later] == ["0", "1"], done.stdout
    assert all(step in ("4", "5") and resets == "[2.0]" for _, step, resets in later), done.stdout
    assert len({step for _, step, _ in later}) == 1
