"""Runs all benchmarks, one after the other, and keeps what they measured: what `make bench` does.

python benchmarks/suite.py                      all, into build/bench
python benchmarks/suite.py allreduce-np2        one
python benchmarks/suite.py gpu                  those on GPUs: what `make gpu-bench` does
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import report
from contest import start

FOLDER = Path(__file__).resolve().parent
RESULTS = report.ROOT / "build" / "bench"


@dataclass(frozen=True)
class Benchmark:
    """One run: ``name`` is its file of results, ``script`` the module here, which understands ``--json FILE``."""

    name: str
    script: str
    words: tuple[str, ...] = ()


BETWEEN_HOSTS = "horo,horo-openmpi,openmpi,horo-mpich,mpich,gloo"

# The order is that of docs/performance.md. A script that has check_rows() also adds its rows to `make bench-check`.
BENCHMARKS = (
    Benchmark("allreduce-np2", "allreduce"),
    Benchmark("allreduce-np2-bfloat16", "allreduce", ("--dtype", "bfloat16", "--min", "1K")),
    Benchmark("allreduce-np4", "allreduce", ("--np", "4")),
    Benchmark(
        "allreduce-hosts2",
        "allreduce",
        ("--hosts", "2", "--min", "4K", "--max", "64M", "--step", "16", "--peers", BETWEEN_HOSTS),
    ),
    Benchmark("collectives-np2", "collectives"),
    Benchmark("collectives-np4", "collectives", ("--np", "4")),
    Benchmark(
        "collectives-hosts2",
        "collectives",
        ("--hosts", "2", "--min", "4K", "--step", "16", "--peers", "horo,gloo,openmpi,mpich"),
    ),
    Benchmark(
        "collectives-hosts2-np4",
        "collectives",
        ("--np", "4", "--hosts", "2", "--min", "4K", "--step", "16", "--peers", "horo,gloo,openmpi,mpich"),
    ),
    Benchmark("latency", "latency"),
    Benchmark("small_tensors", "small_tensors"),
    Benchmark("training_step", "training_step"),
    Benchmark("training_step-hosts2", "training_step", ("--hosts", "2", "--models", "mlp")),
    Benchmark("distributed_step", "distributed_step"),
    Benchmark("distributed_step-hosts2-1gbit", "distributed_step", ("--hosts", "2", "--rate", "1gbit")),
    Benchmark("distributed_step-hosts2-10gbit", "distributed_step", ("--hosts", "2", "--rate", "10gbit")),
    Benchmark("two_hosts", "two_hosts"),
    Benchmark("negotiation", "negotiation"),
    Benchmark("startup", "startup"),
    Benchmark("idle", "idle"),
    Benchmark("footprint", "footprint"),
    Benchmark("elastic_commit", "elastic_commit"),
    Benchmark("elastic_kills", "elastic_kills"),
    Benchmark("gpu_step", "gpu_step"),
    Benchmark("gpu_gradients", "gpu_gradients"),
    Benchmark("gpu_staging", "gpu_staging"),
    Benchmark("gpu_shared", "gpu_shared"),
)
ON_GPUS = "gpu"
"""The name of all that need a GPU."""


def scripts() -> list[str]:
    """The modules that measure, each once."""
    return list(dict.fromkeys(benchmark.script for benchmark in BENCHMARKS))


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs the benchmarks and writes what they measure as JSON.")
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which (default: all of {', '.join(names)})")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="for NAME.json (default: build/bench)")
    arguments = parser.parse_args(words)
    for name in arguments.names:
        if name not in [*names, ON_GPUS]:
            parser.error(f"'{name}' is no benchmark; they are {', '.join(names)}, and all on GPUs {ON_GPUS}")
    if ON_GPUS in arguments.names:
        arguments.names += [name for name in names if name.startswith(f"{ON_GPUS}_")]
    return arguments


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 if a benchmark failed; the others run in any case."""
    failed = []
    for benchmark in BENCHMARKS:
        if arguments.names and benchmark.name not in arguments.names:
            continue
        file = arguments.out / f"{benchmark.name}.json"
        file.unlink(missing_ok=True)  # an old result must not stand for one that failed
        print(f"\n==== {benchmark.name}: {benchmark.script}.py {' '.join(benchmark.words)}".rstrip(), flush=True)
        begin = time.monotonic()
        command = [sys.executable, str(FOLDER / f"{benchmark.script}.py"), *benchmark.words, "--json", str(file)]
        with subprocess.Popen(command) as process:
            try:
                code = process.wait()
            except BaseException:
                process.terminate()  # it ends its contestants
                raise
        if code != 0:
            failed.append(benchmark.name)
        print(f"---- {f'code {code}' if code else file}, {time.monotonic() - begin:.0f} s", flush=True)
    if failed:
        print(f"suite.py: {', '.join(failed)} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    start(parse_arguments, run)
