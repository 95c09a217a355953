"""What benchmarks of one operation at many sizes have in common: options, cases, rates, the table, targets."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import options
import peers
import report
from contest import Contest, ContestError
from rounds import Case, Plan, Result, describe_probe, play

from horo.bench import operations as measured

ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int64": 8}


@dataclass(frozen=True, kw_only=True)
class Operation(measured.Measured):
    """One collective operation, with what it does with the tensor whose size the tables name, for their titles."""

    what: str


_WHAT = {
    "allreduce": "in-place sum",
    "reducescatter": "sum of a tensor, of which each rank gets a part,",
    "alltoall": "a part of a tensor for each rank,",
    "allgather": "a tensor of the parts of all ranks,",
    "broadcast": "a tensor of rank 0 for all, in place,",
}
OPERATIONS = {name: Operation(**vars(measured.OPERATIONS[name]), what=what) for name, what in _WHAT.items()}
ALLREDUCE = OPERATIONS["allreduce"]


def add_options(parser: argparse.ArgumentParser, largest: str) -> None:
    """Adds --min, --max, --step and --dtype to those that all contests have."""
    options.add(parser)
    parser.add_argument("--min", type=report.parse_size, default=4, metavar="SIZE", help="smallest tensor (default: 4)")
    parser.add_argument(
        "--max", type=report.parse_size, default=largest, metavar="SIZE", help="largest tensor (default: %(default)s)"
    )
    parser.add_argument("--step", type=int, default=4, help="factor from one size to the next (default: %(default)s)")
    parser.add_argument("--dtype", choices=ITEM_BYTES, default="float32", help="of the tensors (default: %(default)s)")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parses and refuses what cannot be."""
    arguments = options.parse(parser, words)
    if arguments.step < 2:
        parser.error(f"--step {arguments.step}: at least 2")
    if arguments.max < arguments.min:
        parser.error(f"--max {arguments.max} is below --min {arguments.min}")
    return arguments


def make_cases(sizes: Sequence[int], dtype: str, ranks: int = 1, operation: Operation = ALLREDUCE) -> list[Case]:
    """One case per size; sizes that would come to the same number of elements are one.

    Where ranks have equal parts, the number of elements is a multiple of ``ranks``.
    """
    cases: dict[int, Case] = {}
    unit = ranks if operation.in_parts else 1
    for size in sizes:
        count = max(1, size // ITEM_BYTES[dtype] // unit) * unit
        size_bytes = count * ITEM_BYTES[dtype]
        name = f"benchmark.{operation.name}.{dtype}.{size_bytes}"
        parameters = {"operation": operation.name, "dtype": dtype, "bytes": size_bytes, "count": count, "name": name}
        cases.setdefault(count, Case(report.size_text(size_bytes), parameters))
    return list(cases.values())


@dataclass(frozen=True)
class Rates:
    """Of one contestant at one size, from its median: GB/s with 1e9 bytes."""

    algbw: float
    busbw: float

    @classmethod
    def of(cls, size_bytes: int, ranks: int, median_us: float, operation: Operation = ALLREDUCE) -> Rates:
        algbw = size_bytes / median_us / 1e3
        return cls(algbw, algbw * operation.bus_factor(ranks))


def rows_of(results: Sequence[Result], ranks: int, operation: Operation = ALLREDUCE) -> list[dict[str, Any]]:
    """The rows of the JSON: one per size and contestant."""
    rows = []
    for result in results:
        for row in result.as_rows(ranks=ranks):
            rates = Rates.of(row["bytes"], ranks, row["median_us"], operation)
            rows.append({**row, "algbw": rates.algbw, "busbw": rates.busbw, "ratio": result.ratio(row["contestant"])})
    return rows


TITLES = "{:>9}  {:<14} {:>9} {:>9} {:>9} {:>7} {:>7} {:>9}  {}"


def as_table(
    results: Sequence[Result], ranks: int, dtype: str, where: str = "", operation: Operation = ALLREDUCE
) -> str:
    """The table that people read."""
    lines = [
        f"{operation.name}, {operation.what} of {dtype}, {ranks} rank{'s' if ranks > 1 else ''}{where}; "
        "time of one call on the slowest rank, rates in GB/s (1e9 bytes)",
        TITLES.format("size", "", "min", "median", "max", "algbw", "busbw", "x horo", "results"),
    ]
    for result in results:
        size = result.case.name
        for name in [*result.calls, *result.unsupported]:
            lines.append(_line(size, name, result, ranks, operation))
            size = ""
    lines.append(describe_probe(results))
    return "\n".join(filter(None, lines))


def _line(size: str, name: str, result: Result, ranks: int, operation: Operation) -> str:
    if name in result.unsupported:
        return f"{size:>9}  {name:<9} {result.unsupported[name]}"
    values = result.micros(name)
    rates = Rates.of(result.case.parameters["bytes"], ranks, result.median(name), operation)
    ratio = result.ratio(name)
    times = [report.time_text(value) for value in (min(values), result.median(name), max(values))]
    verdict = f"WRONG: {result.wrong[name]}" if name in result.wrong else "ok"
    shown = "" if ratio is None or name == "horo" else f"{ratio:.2f}"
    return TITLES.format(size, name, *times, f"{rates.algbw:.2f}", f"{rates.busbw:.2f}", shown, verdict)


# ---- targets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """What one size should reach: so many times the best peer, by state of the cores, or so many microseconds."""

    size: int
    ranks: int
    times_best: dict[str, float] = field(default_factory=dict)
    limit_us: float = 0.0
    operation: Operation = ALLREDUCE


RATES_FROM_BYTES = 64 << 10
# A state of the cores in which fewer heats were is not reported.
HEATS_OF_STATE_MIN = 3


def check_targets(targets: Sequence[Target], workload: str, quick: bool) -> list[report.CheckRow]:
    """Measures what the targets are about: for ``check_rows`` of a benchmark.

    Raises:
        ContestError: a contestant died, or a result was wrong.
    """
    contestants = peers.available(list(peers.DEFAULT.values()))
    plan = Plan(rounds=7 if quick else 41)
    rows: list[report.CheckRow] = []
    for ranks in sorted({target.ranks for target in targets}):
        with Contest(in_a_hurry(contestants) if quick and ranks > 2 else contestants, ranks) as contest:
            for operation in dict.fromkeys(target.operation for target in targets):
                mine = [target for target in targets if (target.ranks, target.operation) == (ranks, operation)]
                cases = make_cases([target.size for target in mine], "float32", ranks, operation)
                results = play(contest, workload, cases, plan)
                for target, result in zip(mine, results, strict=True):
                    if result.wrong:
                        raise ContestError(f"{operation.name}, {result.case.name}, {ranks} ranks: {result.wrong}")
                    rows += rows_for(target, result)
    return rows


def in_a_hurry(contestants: Sequence[peers.Peer]) -> Sequence[peers.Peer]:
    """Those who can be the best peer, for many ranks take longer to start than to time; all, where there is no MPI."""
    quickest = [peer for peer in contestants if peer is peers.HORO or peer.library == "mpi"]
    return quickest if len(quickest) > 1 else contestants


def rows_for(target: Target, result: Result) -> list[report.CheckRow]:
    """One row; where the target depends on the state of the cores, one for each state that occurred."""
    if target.limit_us:
        return [_row_for(target, result, "")]
    counts = result.states()
    states = [state for state in target.times_best if counts.get(state, 0) >= HEATS_OF_STATE_MIN]
    return [_row_for(target, result, state) for state in states or [""]]


def _row_for(target: Target, result: Result, state: str) -> report.CheckRow:
    others = sorted((name for name in result.calls if name != "horo"), key=lambda name: result.median(name, state))
    best = others[0] if others else ""
    ratio = result.ratio(best, state=state) if best else None
    is_rate = target.size >= RATES_FROM_BYTES
    figures = {
        name: Rates.of(target.size, target.ranks, result.median(name, state), target.operation).busbw
        if is_rate
        else result.median(name)
        for name in result.calls
    }
    unit = "GB/s" if is_rate else "us"
    if target.limit_us:
        text, is_met = f"<= {target.limit_us:g} us", figures["horo"] <= target.limit_us
    else:
        # Cores that changed their state all the time: the harder of the targets.
        wanted = target.times_best.get(state) or max(target.times_best.values())
        text, is_met = f">= {wanted:g}x", ratio is not None and ratio >= wanted
    cores = {"": "", "sharing": "cores share a cache", "apart": "cores share no cache"}[state]
    rest = ", ".join(f"{name} {report.three_digits(figures[name])}" for name in others[1:])
    what = f"{result.case.name} float32, {target.ranks} ranks"
    return report.CheckRow(
        what=what if target.operation is ALLREDUCE else f"{target.operation.name}, {what}",
        figure=figures["horo"],
        unit=unit,
        peer=best,
        peer_figure=figures[best] if best else None,
        ratio=ratio,
        target=text,
        ok=is_met,
        note="; ".join(filter(None, [rest, cores])),
    )
