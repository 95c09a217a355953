"""Time of an allreduce by horo and by torch's gloo, in the same processes and on the same tensors.

    python benchmarks/allreduce.py                      two ranks on this machine
    python benchmarks/allreduce.py --np 4 --json out.json
    hororun -np 8 -H h1:4,h2:4 python benchmarks/allreduce.py

Sizes and libraries take turns in short rounds, so that a change in the state of the machine falls on all of them. The
terms are defined in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import report
import torch
import torch.distributed as dist
from probe import Probe

import horo.torch as hvd

GLOO_TIMEOUT = timedelta(seconds=120)
WARMUP_OPERATIONS = 3
ITERATIONS_MAX = 10_000
DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.float16, torch.int64)
}
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass
class Case:
    """One size: the tensor that both libraries reduce in place, how often per round, and what was measured."""

    tensor: torch.Tensor
    name: str
    iterations: dict[str, int] = field(default_factory=dict)
    micros: dict[str, list[float]] = field(default_factory=lambda: {"horo": [], "gloo": []})
    is_correct: dict[str, bool] = field(default_factory=lambda: {"horo": True, "gloo": True})

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def parse_size(text: str) -> int:
    """Bytes of ``4``, ``64K`` or ``64M``."""
    number, unit = (text[:-1], text[-1].upper()) if text and not text[-1].isdigit() else (text, "")
    if unit not in UNITS or not number.isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size; write bytes as 4, 64K or 64M")
    return int(number) * UNITS[unit]


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Allreduce by horo and by gloo.")
    parser.add_argument(
        "--np", type=int, default=2, help="ranks to start, unless a launcher did (default: %(default)s)"
    )
    parser.add_argument("--min", type=parse_size, default=4, metavar="SIZE", help="smallest tensor (default: 4)")
    parser.add_argument(
        "--max", type=parse_size, default=64 << 20, metavar="SIZE", help="largest tensor (default: 64M)"
    )
    parser.add_argument("--step", type=int, default=4, help="factor from one size to the next (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the tensors (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="turns of every size (default: %(default)s)")
    parser.add_argument("--round-ms", type=float, default=20, help="aim for one library's turn (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all values there")
    arguments = parser.parse_args(words)
    for name, least in (("np", 1), ("rounds", 1), ("step", 2)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} {getattr(arguments, name)}: at least {least}")
    if arguments.max < arguments.min:
        parser.error(f"--max {arguments.max} is below --min {arguments.min}")
    return arguments


def operation(library: str, case: Case) -> Callable[[], object]:
    """The measured call: a sum over all ranks, in place."""
    if library == "horo":
        return lambda: hvd.allreduce_(case.tensor, op=hvd.Sum, name=case.name)
    return lambda: dist.all_reduce(case.tensor)


def fill_pattern(tensor: torch.Tensor) -> torch.Tensor:
    """Fills with small whole numbers made of rank and place; returns the sum of all ranks, exact in any dtype."""
    place = (torch.arange(tensor.numel()) % 3 + 1).to(tensor.dtype)
    tensor.copy_(place * (hvd.rank() % 4 + 1))
    return place * sum(rank % 4 + 1 for rank in range(hvd.size()))


def check(library: str, case: Case) -> None:
    """Reduces a pattern and compares every element with the known sum."""
    expected = fill_pattern(case.tensor)
    operation(library, case)()
    case.is_correct[library] &= bool(torch.equal(case.tensor, expected))
    case.tensor.zero_()  # the timed calls reduce zeros, which stay zeros however often they are summed


def measure(library: str, case: Case) -> float:
    """Mean time of one call in microseconds, over this library's iterations of one round."""
    call = operation(library, case)
    count = case.iterations[library]
    dist.barrier()
    call()  # all ranks are here now; the exit from a barrier is not part of the time
    begin = time.perf_counter_ns()
    for _ in range(count):
        call()
    return (time.perf_counter_ns() - begin) / 1e3 / count


def calibrate(library: str, case: Case, round_ms: float) -> None:
    """Chooses iterations so that a turn takes about ``round_ms``; rank 0 decides for all."""
    case.iterations[library] = WARMUP_OPERATIONS
    micros = min(measure(library, case) for _ in range(2))
    count = torch.tensor(max(1, min(ITERATIONS_MAX, int(round_ms * 1e3 / micros))))
    dist.broadcast(count, src=0)
    case.iterations[library] = int(count)


def slowest(values: list[float]) -> list[float]:
    """Element by element the largest value of all ranks: a collective is over when its last rank is done."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [float(value) for value in tensor]


def run_rounds(cases: list[Case], arguments: argparse.Namespace, probe: Probe | None) -> list[float]:
    """Measures every case with both libraries in every round; returns the probe's value of each round."""
    for case in cases:
        for library in case.micros:
            check(library, case)
            calibrate(library, case, arguments.round_ms)
    probed = []
    for number in range(arguments.rounds):
        if probe is not None:
            probed.append(probe.measure())
        libraries = ("horo", "gloo") if number % 2 == 0 else ("gloo", "horo")
        for case in cases:
            for library in libraries:
                case.micros[library].append(measure(library, case))
    for case in cases:
        for library in case.micros:
            check(library, case)
            case.micros[library] = slowest(case.micros[library])
            case.is_correct[library] = slowest([0.0 if case.is_correct[library] else 1.0]) == [0.0]
    return slowest(probed) if probed else []


def make_cases(arguments: argparse.Namespace) -> list[Case]:
    cases: list[Case] = []
    size = arguments.min
    while size <= arguments.max:
        dtype = DTYPES[arguments.dtype]
        tensor = torch.zeros(max(1, size // dtype.itemsize), dtype=dtype)
        if not cases or tensor.numel() > cases[-1].tensor.numel():
            cases.append(Case(tensor, name=f"benchmark.{size}"))
        size *= arguments.step
    return cases


def run_rank(arguments: argparse.Namespace) -> int:
    """What every rank does; the first prints. Returns the exit code: 1 if a sum was wrong."""
    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo", rank=hvd.rank(), world_size=hvd.size(), timeout=GLOO_TIMEOUT)
    probe = Probe() if hvd.size() > 1 and hvd.local_size() == hvd.size() else None
    cases = make_cases(arguments)
    probed = run_rounds(cases, arguments, probe)
    rows = [report.Row.of(case.bytes, hvd.size(), case.micros, case.iterations, case.is_correct) for case in cases]
    if hvd.rank() == 0:
        print(report.as_table(rows, hvd.size(), arguments.dtype, probed), flush=True)
        if arguments.json:
            report.write_json(arguments.json, rows, probed, vars(arguments), ranks=hvd.size())
    dist.barrier()
    dist.destroy_process_group()
    hvd.shutdown()
    return 0 if all(row.is_correct for row in rows) else 1


def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    if "RANK" in os.environ or "HOROVOD_RANK" in os.environ:
        return run_rank(arguments)
    launch = [sys.executable, "-m", "horo.runner", "-np", str(arguments.np), "-H", f"localhost:{arguments.np}"]
    return subprocess.call([*launch, "--no-prefix", sys.executable, *sys.argv])


if __name__ == "__main__":
    sys.exit(main())
