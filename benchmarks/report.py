"""Turns measured times into rows, a table and a JSON file. Terms: benchmarks/README.md."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import probe
import torch

import horo
from horo import _core
from horo._config import Config, variables_of

LIBRARIES = ("horo", "gloo")


def bus_factor(ranks: int) -> float:
    """Bytes that must cross a rank's link for each byte of an allreduce: 2 (p - 1) / p."""
    return 2 * (ranks - 1) / ranks


@dataclass(frozen=True)
class Timing:
    """One library at one size. Times are of one call, in microseconds; rates in GB/s (1e9 bytes), from the median."""

    rounds_us: list[float]
    iterations: int
    min_us: float
    median_us: float
    max_us: float
    algbw: float
    busbw: float
    spread: float
    is_correct: bool

    @classmethod
    def of(cls, size_bytes: int, ranks: int, rounds_us: list[float], iterations: int, is_correct: bool) -> Timing:
        rounds_us = [round(value, 3) for value in rounds_us]
        median = statistics.median(rounds_us)
        algbw = size_bytes / median / 1e3
        spread = (max(rounds_us) - min(rounds_us)) / median
        low, high = min(rounds_us), max(rounds_us)
        busbw = algbw * bus_factor(ranks)
        return cls(rounds_us, iterations, low, median, high, algbw, busbw, spread, is_correct)


@dataclass(frozen=True)
class Row:
    """One size. ``ratio`` is gloo's median over horo's: above 1, horo is faster."""

    bytes: int
    horo: Timing
    gloo: Timing
    ratio: float

    @classmethod
    def of(
        cls,
        size_bytes: int,
        ranks: int,
        micros: dict[str, list[float]],
        iterations: dict[str, int],
        is_correct: dict[str, bool],
    ) -> Row:
        timings = {
            name: Timing.of(size_bytes, ranks, micros[name], iterations[name], is_correct[name]) for name in LIBRARIES
        }
        return cls(size_bytes, **timings, ratio=timings["gloo"].median_us / timings["horo"].median_us)

    @property
    def is_correct(self) -> bool:
        return self.horo.is_correct and self.gloo.is_correct


def size_text(size_bytes: int) -> str:
    """``4 B``, ``64 KiB``, ``1.5 MiB``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:g} {unit}"
        value /= 1024
    return f"{value:g} GiB"


def as_table(rows: list[Row], ranks: int, dtype: str, probed: list[float]) -> str:
    """The table that people read, with the line about the state of the cores."""
    head = f"allreduce, sum of {dtype}, {ranks} rank(s); times of one call in us, rates in GB/s (1e9 bytes)"
    titles = "{:>9} | {:>26} {:>6} {:>6} {:>6} | {:>26} {:>6} {:>6} {:>6} | {:>6} {}"
    columns = ("min / median / max", "algbw", "busbw", "spread")
    lines = [head, titles.format("size", *(f"{c}" for c in columns), *columns, "ratio", "sums")]
    lines.insert(1, f"{'':>9} | {'horo':^47} | {'gloo':^47} |")
    for row in rows:
        cells: list[str] = []
        for timing in (row.horo, row.gloo):
            times = " / ".join(f"{value:.1f}" for value in (timing.min_us, timing.median_us, timing.max_us))
            cells += [times, f"{timing.algbw:.2f}", f"{timing.busbw:.2f}", f"{timing.spread:.0%}"]
        wrong = [name for name in LIBRARIES if not getattr(row, name).is_correct]
        sums = f"WRONG: {', '.join(wrong)}" if wrong else "ok"
        lines.append(titles.format(size_text(row.bytes), *cells, f"{row.ratio:.2f}", sums))
    return "\n".join([*lines, *filter(None, [probe.describe(probed)])])


def _first_line(path: str, start: str) -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(start)), "")


def _commit() -> str:
    """The commit of the repository, with ``-dirty`` if something is changed; empty without git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def write_json(path: str, rows: list[Row], probed: list[float], options: dict[str, Any], ranks: int) -> None:
    """Everything that is needed to read the numbers again in a year."""
    tunable = {name for variable in variables_of(Config).values() for name in variable.names}
    knobs = {
        name: value
        for name, value in sorted(os.environ.items())
        if name in tunable or name.startswith(("OMP_", "GLOO_"))
    }
    document = {
        "benchmark": "allreduce",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ranks": ranks,
        "options": {name: value for name, value in options.items() if name != "json"},
        "knobs": knobs,
        "commit": _commit(),
        "versions": {
            "horo": horo.__version__,
            "core": _core.version(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "machine": {
            "cpu": _first_line("/proc/cpuinfo", "model name") or platform.machine(),
            "cores": os.cpu_count(),
            "memory": _first_line("/proc/meminfo", "MemTotal"),
            "system": platform.platform(),
            "simd": _core.simd_name(),
        },
        "probe_us": probed,
        "rows": [asdict(row) for row in rows],
    }
    Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
