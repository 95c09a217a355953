"""Steps over the backend "horo", counted for hororun at each ``optimizer.step()`` of torch, for example with DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from horo.bootstrap.running_rank import RunningRank
from horo.diagnostics.on_signal import show_stack_on_signal
from horo.diagnostics.page import Page
from horo.torch.engine.steps import StepMeter

__all__ = ["StepCounter", "Work"]

Work = tuple[int, int, int, int, int]


class StepCounter:
    """Of one process: its meter reads the counters of all groups together.

    Args:
        world: the group of all ranks.
        work: returns what a context's ``work`` does, of each group that is open.
        page: gets what is counted.
    """

    def __init__(self, world: RunningRank, work: Callable[[], Iterable[Work]], page: Page) -> None:
        self._work = work
        self._left: Work = (0, 0, 0, 0, 0)
        show_stack_on_signal()
        via = "shared memory" if len(world.hosts) == 1 else "TCP"
        page.begin(size=world.size, cores=world.cores, ranks_here=len(world.host_ranks), via=via)
        self._meter = StepMeter(self, page)
        register_optimizer_step_post_hook(self._end_step)

    def work(self) -> Work:
        """As of a context: the sums of all groups, also of those that have been left."""
        return _sums([self._left, *self._work()])

    def leaves(self, group: RunningRank) -> None:
        """A group is about to be left."""
        self._left = _sums([self._left, group.context.work()])

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._meter.end_step(id(optimizer))


def _sums(rows: Iterable[Work]) -> Work:
    blocked, moved, size, tensors, batches = map(sum, zip(*rows, strict=True))
    return blocked, moved, size, tensors, batches
