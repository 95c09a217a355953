"""One rank of autotune.py, which starts it: steps until a search is over, if there is one, then steps that count.

python autotune_rank.py 50
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

import horo.torch as hvd
from horo.torch.engine import runtime

COUNTS = [1 << 12] * 32 + [1 << 15] * 9 + [1 << 18] * 2
"""Values of each tensor of the model: 0.5, 1.1 and 2 MiB in all."""
MOST_STEPS = 5000
HARMLESS = 1e-3


def step(optimizer: torch.optim.Optimizer) -> float:
    """Reduces all gradients at once, as the end of a backward does; seconds."""
    begin = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - begin


def main(words: list[str]) -> int:
    torch.set_num_threads(1)
    hvd.init()
    context = runtime.current().job.context
    is_tuned = os.environ.get("HORO_AUTOTUNE") == "1"
    parameters = [torch.zeros(count) for count in COUNTS]
    for parameter in parameters:
        parameter.requires_grad_().grad = torch.zeros_like(parameter)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0))
    before = 0
    for _ in range(5):
        step(optimizer)
    while is_tuned and not context.tuning()[1]:
        before += 1
        if before > MOST_STEPS:
            raise RuntimeError(f"the search is not over after {before} steps")
        step(optimizer)
    seconds = [step(optimizer) for _ in range(int(words[0]))]
    right = torch.full((1000,), float(hvd.rank()))
    assert abs(float(hvd.allreduce(right, op=hvd.Sum)[0]) - sum(range(hvd.size()))) < HARMLESS
    if hvd.rank() == 0:
        values = context.tuning()[0] if is_tuned else {}
        print(json.dumps({"seconds": seconds, "before": before, "values": values}), flush=True)
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
