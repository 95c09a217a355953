"""What hororun shows of DDP over the backend "horo": steps of optimizers, and what the groups have moved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import TORCH_S, Hororun

DDP = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("horo")
assert "horo.torch" in sys.modules  # by torch: the script does not import it
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
others = dist.new_group([0, 1])
for step in range(1, 21):
    time.sleep(0.03 * rank)
    model(torch.ones(64)).sum().backward()
    dist.all_reduce(torch.ones(1000), group=others)
    if step == 20:
        dist.destroy_process_group(others)
    optimizer.step()
    optimizer.zero_grad()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""


def test_ddp_has_a_card_with_what_was_measured(hororun: Hororun, tmp_path: Path) -> None:
    """By rank 0, which destroys its groups, and by rank 1, which is killed."""
    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(DDP)
    words = ("-np", "2", "--summary", "--json-report", str(report), str(script))
    done = hororun.start(*words).finish(3 * TORCH_S)
    assert done.returncode == 137, done.stderr
    told = json.loads(report.read_text())
    assert [rank["steps"] for rank in told["ranks"]] == [20, 20]
    training = told["training"]
    step, traffic = training["step"], training["traffic"]
    assert training["steps"] == 20 and training["slowest"]["rank"] == 1
    assert step["waiting"] >= 0.01 and 0 <= step["moving"] < step["seconds"]
    expected = 4 * (64 * 8 + 8 + 1000)  # and, once, how DDP has made its buckets anew
    assert traffic["bytes"] == pytest.approx(expected, rel=0.01) and traffic["via"] == "shared memory"
