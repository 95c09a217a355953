"""A rank of gradient_calls.py: hororun -np 2 python benchmarks/gradient_calls_rank.py resnet50 30

Rank 0 prints one JSON object: for `hook` and `end`, calls of Python functions, of C functions, and microseconds of CPU
per gradient.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from workloads.gradients import shapes_of

import horo.torch as hvd

WARM_STEPS = 12  # the first ones compare ranks
SMALL = 256


class Root(torch.autograd.Function):
    """Gives every tensor its gradient, and has ``at_end`` called before what hooks have queued for the end."""

    at_end: Callable[[], None]

    @staticmethod
    def forward(ctx: Any, *values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*values)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        torch.autograd.Variable._execution_engine.queue_callback(Root.at_end)
        return tuple(torch.ones_like(value) for value in ctx.saved_tensors)


class Calls:
    """Counts calls of Python and C functions, before ``begin_end`` and after it."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {"hook": Counter(), "end": Counter()}
        self._part = "hook"

    def begin_end(self) -> None:
        self._part = "end"

    def look(self, frame: Any, event: str, what: Any) -> None:
        if event in {"call", "c_call"}:
            self.counts[self._part][event] += 1


def count_calls(values: Sequence[torch.Tensor]) -> dict[str, Counter[str]]:
    calls = Calls()
    Root.at_end = calls.begin_end
    loss = Root.apply(*values)
    sys.setprofile(calls.look)
    try:
        loss.backward()
    finally:
        sys.setprofile(None)
    return calls.counts


def cpu_ns(values: Sequence[torch.Tensor]) -> tuple[int, int]:
    """CPU of the calling thread until the end of backward begins, and from there."""
    times: list[int] = []
    Root.at_end = lambda: times.append(time.thread_time_ns())
    loss = Root.apply(*values)
    times.append(time.thread_time_ns())
    loss.backward()
    times.append(time.thread_time_ns())
    begin, middle, end = times
    return middle - begin, end - middle


def step(values: Sequence[torch.Tensor], look: Callable[[Sequence[torch.Tensor]], Any], optimizer: Any = None) -> Any:
    for value in values:
        value.grad = None
    found = look(values)
    if optimizer is not None:
        optimizer.step()
    return found


def main() -> None:
    kind, steps = sys.argv[1], int(sys.argv[2])
    hvd.init()
    torch.set_num_threads(1)
    shapes = [torch.Size([SMALL])] * int(kind) if kind.isdecimal() else shapes_of(kind)
    plain, values = ([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes] for _ in range(2))
    named = [(str(index), value) for index, value in enumerate(values)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(values, lr=0.0), named_parameters=named)
    for _ in range(WARM_STEPS):
        step(plain, cpu_ns)
        step(values, cpu_ns, optimizer)
    without, own = step(plain, count_calls), step(values, count_calls, optimizer)
    times = [(*step(plain, cpu_ns), *step(values, cpu_ns, optimizer)) for _ in range(steps)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    if hvd.rank() == 0:
        figures = {
            part: [
                (own[part]["call"] - without[part]["call"]) / len(shapes),
                (own[part]["c_call"] - without[part]["c_call"]) / len(shapes),
                (medians[2 + index] - medians[index]) / 1000 / len(shapes),
            ]
            for index, part in enumerate(("hook", "end"))
        }
        print(json.dumps(figures), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
