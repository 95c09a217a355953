"""What every benchmark writes down, in one form: a JSON document that explains itself, and the rows of the check."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import horo

ROOT = Path(__file__).resolve().parent.parent
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
KNOB_PREFIXES = ("OMP_", "GLOO_", "THP_", "MPICH_", "OMPI_MCA_", "MALLOC_", "LD_PRELOAD")


@dataclass(frozen=True)
class CheckRow:
    """One line of `make bench-check`.

    Attributes:
        what: the row's name: "64 MiB float32, 2 ranks".
        figure: what horo reaches, in ``unit``.
        unit: of ``figure`` and ``peer_figure``: "us", "GB/s", "%".
        peer: the best of the others, "" where there is none to compare with.
        peer_figure: its figure; None without a peer.
        ratio: how many times better than the peer horo is, from medians of rounds; None without a peer.
        target: what should be reached, as people write it: ">= 3.5x", "<= 15 us".
        ok: whether it is.
        note: the state of the machine or whatever else a reader must know.
    """

    what: str
    figure: float
    unit: str
    peer: str
    peer_figure: float | None
    ratio: float | None
    target: str
    ok: bool
    note: str = ""


def document(
    benchmark: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    options: Mapping[str, Any],
    versions: Mapping[str, Mapping[str, str]] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Everything that is needed to read the numbers again in a year.

    Args:
        benchmark: its name, which is also the file's: "allreduce" goes to allreduce.json.
        rows: one flat mapping per measured thing, plain JSON values; what the columns mean stands in README.md.
        options: what was asked for, command line and defaults alike.
        versions: of the contestants, as Contest.versions() gives them.
        more: further top-level entries, such as ``probe_us``.
    """
    from horo.config.table import Config, variables_of  # noqa: PLC0415  (ranks of an older tree take no document)
    from horo.core import context  # noqa: PLC0415

    tunable = {name for variable in variables_of(Config).values() for name in variable.names}
    knobs = {
        name: value for name, value in sorted(os.environ.items()) if name in tunable or name.startswith(KNOB_PREFIXES)
    }
    return {
        "benchmark": benchmark,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "options": dict(options),
        "knobs": knobs,
        "commit": _commit(),
        "versions": {
            "horo": horo.__version__,
            "core": context.version(),
            "torch": metadata.version("torch"),
            "python": platform.python_version(),
        },
        "contestants": {name: dict(texts) for name, texts in (versions or {}).items()},
        "machine": machine(),
        **more,
        "rows": [dict(row) for row in rows],
    }


def machine() -> dict[str, Any]:
    from horo.core import context  # noqa: PLC0415

    return {
        "cpu": _first_line("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": os.cpu_count(),
        "memory": _memory(),
        "system": platform.platform(),
        "simd": context.simd_name(),
    }


def write(path: str | Path, content: Mapping[str, Any]) -> None:
    """Writes a document, and the folders above it."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def save(arguments: argparse.Namespace, benchmark: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Writes the document of a benchmark to the file of its ``--json``, where one is asked for."""
    if arguments.json:
        asked = {name: _plain(value) for name, value in vars(arguments).items() if name != "json"}
        write(arguments.json, document(benchmark, rows, options=asked, **more))


def _plain(value: Any) -> Any:
    """As JSON has it; peers and operations by name."""
    if type(value) in {list, tuple}:  # no named one
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, int | float | str) else getattr(value, "name", str(value))


def parse_size(text: str) -> int:
    """Bytes of ``4``, ``64K`` or ``64M``; for argparse."""
    number, unit = (text[:-1], text[-1].upper()) if text and not text[-1].isdigit() else (text, "")
    if unit not in UNITS or not number.isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size; write bytes as 4, 64K or 64M")
    return int(number) * UNITS[unit]


def size_text(size_bytes: int) -> str:
    """``4 B``, ``64 KiB``, ``1.5 MiB``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:g} {unit}"
        value /= 1024
    return f"{value:g} GiB"


def time_text(micros: float) -> str:
    """``0.85 us``, ``27.3 us``, ``1.09 ms``, ``1.25 s``: three digits."""
    for factor, unit in ((1.0, "us"), (1e3, "ms")):
        if micros / factor < 999.5:
            return f"{three_digits(micros / factor)} {unit}"
    return f"{three_digits(micros / 1e6)} s"


def three_digits(value: float) -> str:
    """``0.85``, ``27.3``, ``752``."""
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"


def _first_line(path: str, start: str) -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(start)), "")


def _memory() -> str:
    """``23.5 GiB``; empty where /proc does not tell."""
    kibibytes = _first_line("/proc/meminfo", "MemTotal").removesuffix("kB").strip()
    return f"{int(kibibytes) / (1 << 20):.1f} GiB" if kibibytes.isdigit() else ""


def _commit() -> str:
    """The commit of the repository, with ``-dirty`` if something is changed; empty without git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
