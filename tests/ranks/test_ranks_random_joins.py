"""Joins, refused calls, signals and records of autotuning beside each other, in schedules drawn by a seed.

A signal handler ends some calls by an exception. What it leaves is known: a handle can be synchronized again, a rank
stays joined, and a request that the core has got goes on without the call that was to wait for it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from interrupts import interrupt_at_random
from rank_pool import RankPool

import horo.torch as hvd
from horo.errors import HoroError
from horo.torch.engine import runtime as _runtime

EPOCHS = 6
TUNED = {"HORO_AUTOTUNE": "1"}
REDUCTIONS: dict[str, tuple[int, Callable[[list[float]], float]]] = {
    "sum": (hvd.Sum, sum),
    "min": (hvd.Min, min),
    "max": (hvd.Max, max),
    "product": (hvd.Product, math.prod),
}
KINDS = (*REDUCTIONS, "average", "large", "gather", "broadcast", "group", "at once", "barrier", "adasum", "refused")


class StopError(Exception):
    """What the handler of a signal raises."""


@dataclass(frozen=True)
class Step:
    """One call of the ranks that have not joined by then; equal on all ranks."""

    kind: str
    size: int
    name: str
    members: list[int]
    process_set: Any
    is_waited_for: bool


def _steps(draw: random.Random, epoch: int, count: int, sets: list[Any]) -> list[Step]:
    steps = []
    for number in range(count):
        process_set = draw.choice(sets)
        members = list(process_set.ranks or range(hvd.size()))
        kind, size = draw.choice(KINDS), draw.choice([1, 3, 100, 5000])
        steps.append(Step(kind, size, f"{kind}.{epoch}.{number}", members, process_set, draw.random() < 0.5))
    return steps


def _submit(step: Step, taking_part: list[int], own: torch.Tensor) -> Any:
    """A handle, or what the call has returned."""
    rank, options = hvd.rank(), {"name": step.name, "process_set": step.process_set}
    if step.kind in REDUCTIONS:
        return hvd.allreduce_async(own, op=REDUCTIONS[step.kind][0], **options)
    if step.kind == "refused":  # by the first of them, which the others hear of
        is_wrong = rank == taking_part[0]
        return hvd.allreduce_async(own.int() if is_wrong else own, op=hvd.Adasum, **options)
    if step.kind == "barrier":
        return hvd.barrier(process_set=step.process_set)
    calls: dict[str, Callable[[], Any]] = {
        "average": lambda: hvd.allreduce_async(own, op=hvd.Average, **options),
        "large": lambda: hvd.allreduce_async(torch.full((300_001,), rank + 1.0), op=hvd.Sum, **options),
        "gather": lambda: hvd.allgather_async(torch.full((rank + 1, 2), rank + 1.0), **options),
        "broadcast": lambda: hvd.broadcast_async(own, taking_part[0], **options),
        "group": lambda: hvd.grouped_allreduce_async([own, own.clone()], op=hvd.Sum, **options),
        "at once": lambda: hvd.allreduce_(own, op=hvd.Sum, **options),
        "adasum": lambda: hvd.allreduce_async(torch.full((step.size,), 2.0), op=hvd.Adasum, **options),
    }
    return calls[step.kind]()


def _expected(step: Step, taking_part: list[int]) -> list[torch.Tensor]:
    values = [rank + 1.0 for rank in taking_part]
    if step.kind == "gather":
        return [torch.cat([torch.full((rank + 1, 2), rank + 1.0) for rank in taking_part])]
    if step.kind == "large":
        return [torch.full((300_001,), sum(values))]
    value = {
        "average": sum(values) / len(step.members),
        "broadcast": values[0],
        "group": sum(values),
        "at once": sum(values),
        "adasum": 2.0,  # equal vectors: their mean
    }.get(step.kind)
    if value is None:
        value = REDUCTIONS[step.kind][1](values)
    return [torch.full((step.size,), value)] * (2 if step.kind == "group" else 1)


class _Interrupts:
    """Those of this rank, drawn by a generator of its own."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.count = 0

    def _may_end(self, call: Callable[[], Any]) -> Any:
        """What ``call()`` returns; one of three is interrupted after 20 us to 20 ms, if it takes so long."""
        if self._draw.random() < 2 / 3:
            return call()
        try:
            return interrupt_at_random(call, StopError, 2e-5 * 1000 ** self._draw.random())
        except StopError:
            self.count += 1
            raise

    def synchronize(self, handle: int) -> Any:
        """As that of ``hvd``, called again after each interrupt."""
        while True:
            try:
                return self._may_end(lambda: hvd.synchronize(handle))
            except StopError:
                pass

    def begin(self, step: Step, taking_part: list[int]) -> Any:
        """As ``_submit``; None where the core has got a request whose handle nobody has."""
        core = _runtime.current().core
        while True:
            own = torch.full((step.size,), hvd.rank() + 1.0)
            if step.kind == "barrier":  # it has an automatic name, of which an interrupt may use up one
                return _submit(step, taking_part, own)
            before = core.counters()["requests"]
            try:
                return self._may_end(lambda: _submit(step, taking_part, own))  # noqa: B023
            except StopError:
                if core.counters()["requests"] == before:
                    continue
            if step.kind != "at once":
                return None
            _await_left()
            return own

    def join(self, number: int, where: str) -> int | None:
        """Ends round ``number``, and does the operation that all ranks do then; the rank that joined last, if known."""
        joining: Any = _runtime.current().joining
        last = None
        while last is None and (joining._rounds < number or joining._round is not None):
            try:
                last = int(self._may_end(hvd.join))
            except StopError:
                if joining._round is not None and self._draw.random() < 0.5:
                    break  # that operation ends the round
        _operate_after_join(where)
        return last


def _await_left() -> None:
    """Until requests of calls that were interrupted are done."""
    runtime: Any = _runtime.current()
    end = time.monotonic() + 50
    while runtime.abandoned:
        runtime.release_abandoned()
        assert time.monotonic() < end


def _operate_after_join(where: str) -> None:
    """The operation that all ranks do after the join; a rank that has joined is refused until all have."""
    end = time.monotonic() + 50
    while True:
        try:
            hvd.barrier()
        except hvd.UsageError as error:
            assert "has joined" in str(error), where
            assert time.monotonic() < end, where
        else:
            return


def _check(step: Step, handle: Any, taking_part: list[int], where: str, interrupts: _Interrupts) -> None:
    if step.kind == "barrier" or handle is None:
        return
    if step.kind == "refused":
        with pytest.raises(HoroError, match="Adasum"):
            interrupts.synchronize(handle)
        return
    result = handle if isinstance(handle, torch.Tensor) else interrupts.synchronize(handle)
    results = [result] if isinstance(result, torch.Tensor) else result
    for got, wanted in zip(results, _expected(step, taking_part), strict=True):
        torch.testing.assert_close(got, wanted, msg=lambda text: f"{where}, {step}: {text}")


def _change_values(draw: random.Random) -> None:
    """As autotuning does, from the next batch on."""
    core = _runtime.current().job.context
    sizes = {"segment": draw.choice([4096, 65_536, 1 << 20]), "fusion": draw.choice([0, 1 << 18, 1 << 27])}
    core.propose_tuning({**core.tuning()[0], **sizes})


def _play(steps: list[Step], counts: list[int], interrupts: _Interrupts, where: str) -> tuple[int, set[Any]]:
    """What this rank does before it joins; the number of its steps, and the values that autotuning has had."""
    rank, done, tuned = hvd.rank(), 0, set()
    pending: list[tuple[Step, Any, list[int]]] = []
    for number, step in enumerate(steps[: counts[rank]]):
        if rank == 0:
            _change_values(random.Random(f"{where} {number}"))
        if rank not in step.members:
            continue
        taking_part = [member for member in step.members if counts[member] > number]
        done += 1
        try:
            handle = interrupts.begin(step, taking_part)
        except HoroError:
            assert step.kind == "refused" and rank == taking_part[0], where
            continue
        pending.append((step, handle, taking_part))
        if step.is_waited_for:
            _check(*pending.pop(), where, interrupts)
        tuned.add(tuple(_runtime.current().job.context.tuning()[0].values()))
    for step, handle, taking_part in pending:
        _check(step, handle, taking_part, where, interrupts)
    return done, tuned


def _run(seed: int) -> tuple[int, int, int]:
    """Plays the schedule; the number of steps, of different values that autotuning has had, and of interrupts."""
    draw, rank, size = random.Random(seed), hvd.rank(), hvd.size()
    interrupts = _Interrupts(random.Random(f"{seed} {rank}"))
    sets: list[Any] = [hvd.global_process_set]
    sets += [hvd.add_process_set(sorted(draw.sample(range(size), count))) for count in range(2, size)]
    done, tuned = 0, set()
    for epoch in range(EPOCHS):
        count = draw.randint(1, 25)
        counts = [draw.choice([0, count, count, draw.randint(0, count)]) for _ in range(size)]
        where = f"seed {seed}, epoch {epoch}, rank {rank}, steps of the ranks {counts}"
        played, values = _play(_steps(draw, epoch, count, sets), counts, interrupts, where)
        done += played
        tuned |= values
        last = interrupts.join(epoch + 1, where)
        assert last is None or 0 <= last < size, where
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"after.{epoch}").item() == size, where
    _await_left()
    return done, len(tuned), interrupts.count


@pytest.mark.parametrize("size", [2, 4])
def test_random_schedules_of_joins_refusals_signals_and_records_of_autotuning(size: int) -> None:
    seeds = [1, random.SystemRandom().randrange(1 << 30)]
    print(f"seeds {seeds}")  # shown where the test fails
    values = interrupted = 0
    for seed in seeds:
        with RankPool(size, environment=TUNED) as pool:
            played = pool.run(_run, seed)
        assert sum(done for done, _, _ in played) > 0
        values = max(values, *(tuned for _, tuned, _ in played))
        interrupted += sum(count for _, _, count in played)
    assert values > 1, "autotuning has changed nothing in any of them"
    assert interrupted > 0, "no signal has come within a call"
