"""One rank of ``horo bench``: measures operations with the others; rank 0 prints."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import horo.torch as hvd
from horo.bench.operations import OPERATIONS, Part
from horo.bench.options import ITEM_BYTES, BenchOptionError, read_options
from horo.bench.table import TITLES, Row, beside_line, best_lines, line_of, sizes_of
from horo.runner.job.amounts import size as in_words
from horo.torch.engine.runtime import current
from horo.version import __version__

if TYPE_CHECKING:
    import argparse

__all__ = ["main"]

_ENOUGH_S = 0.5
"""So long calls of one size may take together, if they are at least ``_CALLS_MIN``."""
_CALLS_MIN = 3
_WARM_UP = 2
_COPIES = 3
"""Of the largest tensor: what is given, the result, the memory of a host for what moves."""
_WRONG, _INTERRUPTED = 2, 130


def main(words: Sequence[str]) -> int:
    """Measures; returns 0, 1 if a result was wrong, 2 if nothing can be measured."""
    try:
        given = read_options(words)
    except BenchOptionError as error:
        sys.stderr.write(f"horo {error}\n")
        return _WRONG
    hvd.init()
    has_gpu = torch.cuda.is_available()
    device = given.device or ("cuda" if has_gpu else "cpu")
    trouble = "--device cuda: torch finds no GPU here" if device == "cuda" and not has_gpu else _too_large(given.max)
    troubles = [each for each in hvd.allgather_object(trouble) if each]
    if troubles:
        _say(f"horo bench: {troubles[0]}", sys.stderr)
        return _WRONG
    if device == "cuda":
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    _say(_head(given, device))
    _say(TITLES)
    rows = []
    for row in _measure(given, device):
        rows.append(row)
        _say(line_of(row))
    for line in best_lines(rows):
        _say(line)
    if given.beside is not None:
        _say(beside_line(rows, given.beside))
    return int(any(row.wrong for row in rows))


def _say(text: str, stream: Any = None) -> None:
    if hvd.rank() == 0:
        print(text, file=stream or sys.stdout, flush=True)


def _too_large(largest: int) -> str:
    """The reason why tensors of this size cannot be made here; empty: they can."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", Path("/proc/meminfo").read_text("ascii"), re.MULTILINE)
    free = 1024 * int(found[1]) if found else 0
    needed = _COPIES * largest * hvd.local_size()
    if not found or needed <= free:
        return ""
    ranks = f"{hvd.local_size()} rank{'' if hvd.local_size() == 1 else 's'}"
    return f"--max {in_words(largest)}: {ranks} on a host need {in_words(needed)}, of which {in_words(free)} are free"


def _head(given: argparse.Namespace, device: str) -> str:
    job = current().job
    via = "shared memory" if len(job.hosts) == 1 else "MPI" if job.mpi is not None else "TCP"
    ranks = f"{job.size} rank{'' if job.size == 1 else 's'}"
    hosts = f"{len(job.hosts)} host{'' if len(job.hosts) == 1 else 's'}"
    way = "" if job.size == 1 else f", {via if job.nccl_device is None else 'NCCL'}"
    return f"horo {__version__}: {ranks} on {hosts}{way}, tensors of {given.dtype} on {device}"


def _measure(given: argparse.Namespace, device: str) -> Iterator[Row]:
    for name in given.operations:
        unit = hvd.size() if OPERATIONS[name].in_parts else 1
        counts = [max(1, each // ITEM_BYTES[given.dtype] // unit) * unit for each in _sizes(given)]
        for count in dict.fromkeys(counts):
            part = Part(name, hvd.rank(), hvd.size(), count)
            tensor = torch.zeros(part.given, dtype=getattr(torch, given.dtype), device=device)
            call = _call_of(part, tensor)
            wrong = _count_wrong(part, tensor, call)
            tensor.zero_()  # zeros stay zeros however often they are summed
            times_us = _time(call, given.iterations, device)
            yield Row(name, given.dtype, count * ITEM_BYTES[given.dtype], count, hvd.size(), times_us, wrong)


def _sizes(given: argparse.Namespace) -> list[int]:
    return sizes_of(given.min, given.max, given.factor)


def _call_of(part: Part, tensor: torch.Tensor) -> Callable[[], Any]:
    name = f"bench.{part.operation}.{part.count}"
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=name),
        "allgather": lambda: hvd.allgather(tensor, name=name),
        "reducescatter": lambda: hvd.reducescatter(tensor, op=hvd.Sum, name=name),
        "alltoall": lambda: hvd.alltoall(tensor, name=name),
        "broadcast": lambda: hvd.broadcast_(tensor, 0, name=name),
    }
    return calls[part.operation]


def _count_wrong(part: Part, tensor: torch.Tensor, call: Callable[[], Any]) -> int:
    part.fill(tensor)
    wrong = part.count_wrong(call())
    return int(hvd.allreduce(torch.tensor(wrong), op=hvd.Sum, name="bench.wrong"))


def _time(call: Callable[[], Any], most: int, device: str) -> tuple[float, ...]:
    """Microseconds of each call on its slowest rank."""
    for _ in range(_WARM_UP):
        estimate_s = _time_one(call, device)
    slowest_s = float(hvd.allreduce(torch.tensor(estimate_s, dtype=torch.float64), op=hvd.Max, name="bench.estimate"))
    calls = min(most, max(_CALLS_MIN, int(_ENOUGH_S / max(slowest_s, 1e-9))))
    seconds = torch.tensor([_time_one(call, device) for _ in range(calls)], dtype=torch.float64)
    return tuple((1e6 * hvd.allreduce(seconds, op=hvd.Max, name=f"bench.times.{calls}")).tolist())


def _time_one(call: Callable[[], Any], device: str) -> float:
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:  # hororun tells
        code = _INTERRUPTED
    sys.exit(code)
