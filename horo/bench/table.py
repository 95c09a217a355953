"""The lines that ``horo bench`` prints. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from horo.bench.operations import OPERATIONS, busbw_of
from horo.bench.options import Beside
from horo.runner.job.amounts import count, ms, size

__all__ = ["TITLES", "Row", "beside_line", "best_lines", "line_of", "sizes_of"]

_FORMAT = "{:<14} {:>11} {:>11} {:>9} {:>10} {:>10} {:>8} {:>8} {:>6}"
TITLES = "\n".join(
    (
        _FORMAT.format("", "size", "count", "type", "time min", "median", "algbw", "busbw", "wrong"),
        _FORMAT.format("", "bytes", "elements", "", "us", "us", "GB/s", "GB/s", "").rstrip(),
    )
)


@dataclass(frozen=True)
class Row:
    """One operation at one size.

    Attributes:
        operation: its name.
        dtype: of its tensors.
        size_bytes, count: of the largest tensor on a rank.
        ranks: of the job.
        times_us: of each call, on its slowest rank.
        wrong: elements with a wrong value, on all ranks.
    """

    operation: str
    dtype: str
    size_bytes: int
    count: int
    ranks: int
    times_us: tuple[float, ...]
    wrong: int

    @property
    def median_us(self) -> float:
        """The median of the calls."""
        return median(self.times_us)

    @property
    def busbw(self) -> float:
        """The rate on the busiest link, in GB/s."""
        return busbw_of(self.operation, self.ranks, self.size_bytes, self.median_us)[1]


def sizes_of(smallest: int, largest: int, factor: int) -> list[int]:
    """The sizes from one to the other."""
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return sizes


def line_of(row: Row) -> str:
    """The line of a row, below ``TITLES``."""
    algbw, busbw = busbw_of(row.operation, row.ranks, row.size_bytes, row.median_us)
    return _FORMAT.format(
        row.operation,
        row.size_bytes,
        row.count,
        row.dtype,
        f"{min(row.times_us):.1f}",
        f"{row.median_us:.1f}",
        f"{algbw:.2f}",
        f"{busbw:.2f}",
        row.wrong,
    )


def best_lines(rows: Sequence[Row]) -> list[str]:
    """The best rate of each operation, and whether all results were right."""
    best = []
    for name in OPERATIONS:
        own = [row for row in rows if row.operation == name]
        if own and own[0].ranks > 1:
            most = max(own, key=lambda row: row.busbw)
            best.append(f"{name} {most.busbw:.2f} at {size(most.size_bytes)}")
    wrong = sum(row.wrong for row in rows)
    lines = [f"best busbw in GB/s: {', '.join(best)}"] if best else ["one rank alone exchanges nothing: busbw is 0"]
    return [*lines, f"WRONG: {wrong:,} elements" if wrong else "all results are right"]


def beside_line(rows: Sequence[Row], beside: Beside) -> str:
    """An earlier job, with the time for which its data would move at the rate of the nearest size here."""
    per_batch = beside["bytes"] / beside["batches"]
    own = [row for row in rows if row.operation == "allreduce"]
    told = (
        f"{beside['file']}: blocked for {ms(beside['moving'])} ms a step while {size(beside['bytes'])} moved in "
        f"{count(max(1, round(beside['batches'])), 'batch', 'batches')}"
    )
    if not own:
        return f"{told}; without allreduce among --operations there is nothing to compare"
    nearest = min(own, key=lambda row: max(row.size_bytes, per_batch) / min(row.size_bytes, per_batch))
    us = nearest.median_us * max(1.0, per_batch / nearest.size_bytes) * beside["batches"]
    return f"{told}; here they take {ms(us / 1e6)} ms, by the rate at {size(nearest.size_bytes)}"
