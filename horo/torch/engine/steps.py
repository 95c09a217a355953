"""The time of this rank's steps and its parts, from counters that are read once per step."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from functools import cached_property
from operator import sub
from pathlib import Path
from typing import Protocol

import torch

from horo.diagnostics.board import Board, LastSteps
from horo.diagnostics.page import Page
from horo.diagnostics.slowest import Slowest
from horo.torch.compat.loading import take_loading_ns, watch_loaders

__all__ = ["Stats", "StepMeter", "StepTimes"]

_NOTHING = (0,) * 8
_HIGHEST = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True)
class StepTimes:
    """The parts of the time of steps. A step is from the end of one ``optimizer.step()`` to the end of the next.

    Attributes:
        steps: How many steps these are. The first one of a job is not among them: it has the start of the program.
        seconds: The time in all.
        waiting: Seconds for which this rank was blocked until the last rank had come.
        moving: Seconds for which it was blocked while data moved between ranks.
        loading: Seconds for which the thread that called ``step()`` waited for torch's ``DataLoader``.
        bytes: Of the tensors that were exchanged.
        tensors: Their number.
        batches: The exchanges that they were fused into.
    """

    steps: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    moving: float = 0.0
    loading: float = 0.0
    bytes: int = 0
    tensors: int = 0
    batches: int = 0

    @property
    def computing(self) -> float:
        """Seconds for which this rank did anything else, loading included."""
        return self.seconds - self.waiting - self.moving


@dataclass(frozen=True)
class Stats:
    """The steps of this rank since ``init()``, as ``hvd.stats()`` returns them.

    Attributes:
        steps: How often an optimizer of ``hvd.DistributedOptimizer`` has done its step.
        last: The last step.
        total: All steps but the first.
        peak_memory: Most bytes of memory that this process has had.
        peak_gpu_memory: Most bytes that torch has given out on the current GPU; 0 without one.
    """

    steps: int
    last: StepTimes
    total: StepTimes
    peak_memory: int
    peak_gpu_memory: int
    _last_steps: LastSteps | None = field(default=None, repr=False)

    @cached_property
    def slowest(self) -> Slowest | None:
        """The rank that the others waited for in most of the last 64 steps, by the rule of hororun's card.

        An object with ``rank``, ``share`` of the steps, ``behind_s`` and ``loading_s`` in seconds. None if no rank is
        last clearly more often than by chance, by at least 5 % of a step. None in a job on several hosts, too: there a
        rank does not know the steps of the others.
        """
        return None if self._last_steps is None else self._last_steps.slowest()


class _Core(Protocol):
    def work(self) -> tuple[int, int, int, int, int]:
        """As of a context."""


class StepMeter:
    """Reads the counters of a context at the end of each step.

    Args:
        core: the context, or several together.
        page: gets what it has read.
        board: the same, for other ranks of the host.
    """

    def __init__(self, core: _Core, page: Page | None = None, board: Board | None = None) -> None:
        self._core = core
        self.page = page or Page()
        self._board = board
        self._steps = self._measured = self._loading = 0
        self._counted: int | None = None
        self._other: int | None = None
        """Another optimizer that has done a step since the counted one has."""
        self._first: tuple[int, ...] = ()
        self._before: tuple[int, ...] = ()
        self._now: tuple[int, ...] = ()
        self._stride = 1
        """Samples in the page are of the steps whose numbers are multiples of it."""

    def end_step(self, optimizer: int) -> None:
        """An optimizer, known by a number, has done a step.

        Of several that take turns, one counts the steps, until another one does two without it.
        """
        if optimizer not in (self._counted, self._other) and self._counted is not None:
            self._other = optimizer
            return
        self._counted, self._other = optimizer, None
        self._steps = done = self._steps + 1
        blocked, moving, *sums = self._core.work()
        before = self._before = self._now
        self._loading += take_loading_ns()
        self._now = now = (time.perf_counter_ns(), blocked - moving, moving, self._loading, *sums)
        if not before:
            self._first = now
            self.page.step_ends(done, *_NOTHING)
            watch_loaders()
            return
        self._measured += 1
        self.page.step_ends(done, self._measured, *map(sub, now, self._first))
        waiting_us, loading_us = max(0, now[1] - before[1]) // 1000, (now[3] - before[3]) // 1000
        if self._board is not None:
            self._board.add(done, waiting_us, loading_us, (now[0] - before[0]) // 1000)
        if done % self._stride == 0 and self.page.add_sample(done, waiting_us, loading_us):
            self._stride *= 2
            self.page.thin_out(self._stride)

    def stats(self) -> Stats:
        """The object for users."""
        last = total = StepTimes()
        if self._measured:
            last, total = _times(1, self._before, self._now), _times(self._measured, self._first, self._now)
        has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call, unused-ignore]
        gpu = torch.cuda.max_memory_allocated() if has_gpu else 0
        return Stats(self._steps, last, total, peak_memory(), gpu, None if self._board is None else self._board.look())

    def summary(self) -> dict[str, object]:
        """The sums for hororun, in whole numbers, and the samples as columns."""
        stats = self.stats()
        total, samples = stats.total, self.page.samples()
        return {
            "steps": self._steps,
            "measured": total.steps,
            "ns": int(1e9 * total.seconds),
            "waiting": int(1e9 * total.waiting),
            "moving": int(1e9 * total.moving),
            "loading": int(1e9 * total.loading),
            "bytes": total.bytes,
            "tensors": total.tensors,
            "batches": total.batches,
            "samples": [[sample[column] for sample in samples] for column in range(3)],
            "peak": stats.peak_memory,
            "gpu_peak": stats.peak_gpu_memory,
        }


def _times(steps: int, before: tuple[int, ...], now: tuple[int, ...]) -> StepTimes:
    ns, waiting, moving, loading, *sums = map(sub, now, before)
    return StepTimes(steps, ns / 1e9, max(0, waiting) / 1e9, max(0, moving) / 1e9, loading / 1e9, *sums)


def peak_memory() -> int:
    """Most bytes of memory that this process has had; 0: Linux does not tell."""
    try:
        found = _HIGHEST.search(Path("/proc/self/status").read_text("ascii", "replace"))
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0
