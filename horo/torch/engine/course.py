"""The course of this rank's training: its steps, which messages to other ranks name, and what it lacks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as _torch_optimizer

from horo.config.table import LaunchVariables, environment, read_variables
from horo.diagnostics.on_signal import show_stack_on_signal
from horo.diagnostics.page import Page
from horo.errors import AbortedError
from horo.torch.engine.steps import StepMeter

if TYPE_CHECKING:
    from horo.bootstrap.running_rank import RunningRank

__all__ = ["SCRIPT_ENDED", "SHUT_DOWN", "Course"]

SHUT_DOWN = "has shut horo down"
SCRIPT_ENDED = "came to the end of its script"

_COMBINE = ("allreduce", "reducescatter", "alltoall")
"""Operations by which a program may average itself what it trains. It may also gather, once per step or more often;
horo does that a few times for its own purposes."""
_OWN_GATHERS = 8
_UNUSED_MAX = 64
_NAME_MAX = 200


class Course:
    """Of one rank in one job.

    Args:
        job: the rank.
    """

    def __init__(self, job: RunningRank) -> None:
        self._job = job
        self._steps = 0
        self._plain_steps = 0
        if job.reporter.has_reader:
            show_stack_on_signal()
        self.meter = StepMeter(job.context, Page(read_variables(LaunchVariables, environment()).counts_fd), job.board)
        self.meter.page.begin(size=job.size, cores=job.cores, ranks_here=len(job.host_ranks), via=self._via())
        self.find_unused: Callable[[], list[str]] = list
        """The names of the parameters that had no gradient on this rank in the last step."""
        self._hook: Any = None
        if job.size > 1:
            self._hook = _torch_optimizer.register_optimizer_step_post_hook(self._count_plain_step)

    def begin_step(self, done: int) -> None:
        """An optimizer of horo, which has done so many steps, begins to reduce gradients for the next one."""
        self._job.context.step[0] = done + 1
        self.meter.page.step_begins(done + 1)
        if self._hook is not None:
            self.stop()

    def end_step(self, done: int, optimizer: int) -> None:
        """It has done so many; it is known by a number."""
        self._job.context.step[0] = 0
        self._steps = max(self._steps, done)
        self.meter.end_step(optimizer)

    def report(self) -> None:
        """Hands the sums of this rank to hororun, if there is one. Called at the end, while the context is there."""
        job = self._job
        if not job.reporter.has_reader:
            self.meter.page.close()
            return
        sums = self.meter.summary()
        job.reporter.summary(
            {
                **sums,
                "within": int(job.context.step[0]),
                "size": job.size,
                "cores": job.cores,
                "ranks_here": len(job.host_ranks),
                "on_cpu": int(sums["gpu_peak"] == 0),
                "via": self._via(),
                "unused": [_short(name) for name in self.find_unused()[:_UNUSED_MAX]],
            }
        )
        self.meter.page.close()

    def _via(self) -> str:
        job = self._job
        by_hosts = "shared memory" if len(job.hosts) == 1 else "MPI" if job.mpi is not None else "TCP"
        return "" if job.size == 1 else by_hosts if job.nccl_device is None else "NCCL"

    def stop(self) -> None:
        """Looks at optimizers of torch no longer. Idempotent."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    def words(self, end: str) -> str:
        """The words about its end for other ranks that wait for this one; empty: only that it has left."""
        steps = f" after {self._steps} step{'' if self._steps == 1 else 's'}" if self._steps else ""
        return end + steps if steps or end != SHUT_DOWN else ""

    def warn(self) -> None:
        """Called at the end: logs a warning on rank 0 if models have trained apart that began alike."""
        core = self._job.context
        has_failed = not isinstance(core.health(), (type(None), AbortedError))  # others may have come to their end
        if self._hook is None or self._plain_steps == 0 or self._job.rank != 0 or has_failed:
            return
        by_torch = torch.distributed.is_available() and torch.distributed.is_initialized()
        averages = core.count_of(*_COMBINE) > 0 or core.count_of("allgather") >= max(self._plain_steps, _OWN_GATHERS)
        if by_torch or averages or core.count_of("broadcast") == 0:
            return
        logging.getLogger("horo").warning(
            "optimizer.step() was called %d times, and nothing was averaged between the %d ranks: each has trained a "
            "model of its own, on its own data alone; if that is not what you want, add "
            "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())",
            self._plain_steps,
            self._job.size,
        )

    def _count_plain_step(self, *_: object) -> None:
        self._plain_steps += 1


def _short(name: str) -> str:
    """A name that lacks its middle if it is long: hororun reads lines of a limited length."""
    return name if len(name) <= _NAME_MAX else f"{name[: _NAME_MAX // 2]}...{name[-_NAME_MAX // 2 :]}"
