"""The allreduce benchmark runs, checks its sums, and computes rates by the formulas of its README."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from example_runs import ROOT, start
from jobs import wait_until

FOLDER = ROOT / "benchmarks"
SCRIPT = str(FOLDER / "allreduce.py")
SHORT = ["--max", "4K", "--step", "32", "--rounds", "2", "--turn-ms", "1", "--peers", "horo,gloo"]

sys.path.insert(0, str(FOLDER))
import report  # noqa: E402  (benchmarks/report.py)
import sizes  # noqa: E402  (benchmarks/sizes.py)
from contest import Turn  # noqa: E402  (benchmarks/contest.py)
from rounds import Case, Heat, Result  # noqa: E402  (benchmarks/rounds.py)
from workloads import allreduce as workload  # noqa: E402  (benchmarks/workloads/allreduce.py)


def test_measures_two_libraries_and_writes_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "made" / "out.json"
    done = start([sys.executable, SCRIPT, *SHORT, "--json", str(file)])
    document = json.loads(file.read_text())

    assert document["benchmark"] == "allreduce"
    assert document["options"]["peers"] == ["horo", "gloo"]
    assert set(document) >= {"machine", "versions", "commit", "knobs", "options", "time", "contestants"}
    assert len(document["probe_us"]) == 2 * 2 * 3  # before and after each of two heats of three sizes
    rows = document["rows"]
    assert [(row["bytes"], row["contestant"]) for row in rows] == [
        (size, name) for size in (4, 128, 4096) for name in ("horo", "gloo")
    ]
    for row in rows:
        assert row["wrong"] == ""
        assert row["ranks"] == 2
        assert len(row["rounds_us"]) == len(row["states"]) == 2
        assert row["min_us"] <= row["median_us"] <= row["max_us"]
    assert done.stdout.count(" ok\n") == 6
    assert done.stderr == ""


def test_programs_that_compute_end_with_a_benchmark_that_is_killed() -> None:
    code = "import options\nwith options.busy_programs(1) as (one,):\n    print(one.pid, flush=True), one.wait(60)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=FOLDER, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        program = int(benchmark.stdout.readline())
        benchmark.kill()
    wait_until(lambda: not has_process(program), "its end")


def has_process(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def result_of(heats: list[tuple[float, float]], wrong: dict[str, str]) -> Result:
    """horo and gloo took so many microseconds, heat by heat."""
    turns = [{"horo": Turn(horo, []), "gloo": Turn(gloo, [])} for horo, gloo in heats]
    case = Case("4 KiB", {"bytes": 4096})
    return Result(
        case,
        {"horo": 1, "gloo": 1},
        {"MPICH": "bfloat16 is no type of MPI"},
        wrong,
        [Heat((200.0, 200.0), turn) for turn in turns],
    )


def test_the_table_says_who_was_wrong_who_was_faster_and_who_was_left_out() -> None:
    table = sizes.as_table([result_of([(10.0, 30.0)], {"horo": "rank 1: 3 of 1024 elements"})], 2, "bfloat16")
    horo, gloo, mpich = table.splitlines()[2:5]
    assert horo.endswith("WRONG: rank 1: 3 of 1024 elements")
    assert gloo.split()[-2:] == ["3.00", "ok"]
    assert mpich.split("MPICH")[1].strip() == "bfloat16 is no type of MPI"


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
@pytest.mark.parametrize("count", [1, 1000])
def test_every_element_of_a_sum_is_compared(make: Any, count: int) -> None:
    values = make(count)
    workload.fill_pattern(values, 7)
    assert values.tolist() == [7 * (place % 3 + 1) for place in range(count)]
    assert workload.count_wrong(values, 7) == 0
    values[count - 1] += 1
    assert workload.count_wrong(values, 7) == 1
    assert workload.count_wrong(values, 100) == count


@pytest.mark.parametrize(("text", "size"), [("4", 4), ("64K", 65536), ("64m", 64 << 20), ("2G", 2 << 30)])
def test_sizes_are_read(text: str, size: int) -> None:
    assert report.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "K", "4T", "-4", "4.5M"])
def test_bad_size_is_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a size"):
        report.parse_size(text)
