"""Schedules of the learning rate that depend on the number of ranks."""

from __future__ import annotations

import operator

import torch
from torch.optim.lr_scheduler import LinearLR

from horo.errors import UsageError
from horo.torch.engine import runtime
from horo.torch.ops.process_set import ProcessSet, global_process_set

__all__ = ["LearningRateWarmup"]


class LearningRateWarmup(LinearLR):
    """Raises the learning rate from that of one rank to that of all, in equal steps.

    N ranks with batch *b* take the steps of one process with batch *N b*, so a learning rate that was chosen for *b* is
    multiplied by N. Make the optimizer with that one; the warm-up begins with 1/N of it, for each group (Goyal et al.,
    Accurate, Large Minibatch SGD, 2017). SGD's momentum needs no correction.

    Call ``step()`` after each training step, or after each epoch: ``steps`` counts these calls. Schedulers of torch
    whose ``step()`` multiplies the present rate, such as MultiStepLR and CosineAnnealingLR, may run beside it.
    ``state_dict()`` and ``load_state_dict()`` are torch's; the number of ranks of the first job stays.

    Args:
        optimizer: A distributed optimizer, or the one that it will be made of.
        steps: Calls of ``step()`` until the learning rate is that of all ranks; 0: from the start.
        process_set: The ranks that count, those of the optimizer.
        last_epoch: As for torch's schedulers: the number of calls done before; -1: none.

    Raises:
        UsageError: ``steps`` is not a number from 0 on.
        NotInitializedError: Before ``init()``.

    Example:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
        optimizer = hvd.DistributedOptimizer(optimizer, model)
        warmup = hvd.LearningRateWarmup(optimizer, steps=5)
        for _ in range(5):  # 0.01, then more each time, then 0.01 * hvd.size()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            warmup.step()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        steps: int,
        process_set: ProcessSet = global_process_set,
        last_epoch: int = -1,
    ) -> None:
        try:
            count = operator.index(steps)
        except TypeError:
            count = -1
        if count < 0:
            raise UsageError(f"LearningRateWarmup(steps={steps!r}): expected the number of calls of step(), from 0 on")
        runtime.current()
        members = (process_set.size() or 1) if process_set.included() else 1  # others train as in a job of one rank
        start = 1 / members if count else 1.0
        super().__init__(optimizer, start_factor=start, total_iters=count, last_epoch=last_epoch)
