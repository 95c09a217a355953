"""Benchmarks that start many ranks write down what they measured."""

from __future__ import annotations

import csv
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from example_runs import ROOT, start, whole

FOLDER = ROOT / "benchmarks"
sys.path.insert(0, str(FOLDER))
import autotune  # noqa: E402  (benchmarks/autotune.py)
import spaces  # noqa: E402  (benchmarks/spaces.py)


def run(script: str, folder: Path, *words: str) -> tuple[list[dict[str, Any]], str]:
    """The rows that it has written, and what it has printed."""
    file = folder / "out.json"
    said = start([sys.executable, str(FOLDER / f"{script}.py"), *words, "--json", str(file)]).stdout
    return json.loads(file.read_text())["rows"], said


@whole
@pytest.mark.skipif(bool(spaces.why_not()), reason=spaces.why_not())
def test_four_jobs_are_autotuned(tmp_path: Path) -> None:
    log = tmp_path / "autotune.csv"
    rows, said = run("autotune", tmp_path, "--steps", "3", "--max-samples", "3", "--log", str(log))
    assert [row["job"] for row in rows] == list(autotune.JOBS)
    assert all(len(row["seconds"]) == 3 and min(row["seconds"]) > 0 for row in rows)
    assert [row["before"] > 0 for row in rows] == [False, False, True, True]
    assert rows[3]["values"].keys() == {*rows[2]["values"]} != set()
    assert said.count(" / ") >= 8
    samples = list(csv.DictReader(log.open()))
    assert samples[1]["segment_bytes"] == autotune.BAD["HORO_SEGMENT_BYTES"]
    assert samples[-1]["stage"] == "best"


@whole
def test_teams_are_timed_one_after_the_other_at_once_and_beside(tmp_path: Path) -> None:
    words = ["--layouts", "2;1,1", "--sizes", "4K,64K", "--rounds", "2", "--turn-ms", "5"]
    rows, said = run("teams", tmp_path, *words)
    assert [(row["layout"], row["bytes"]) for row in rows] == [("2", 4096), ("2", 65536), ("1,1", 4096), ("1,1", 65536)]
    times = [row[key] for row in rows for key in ("after_us", "at_once_us", "beside_us")]
    assert all(len(each) == 2 and min(each) > 0 for each in times)
    assert len(said.splitlines()) == 5


@whole
def test_steps_are_timed_with_a_timeline_and_without(tmp_path: Path) -> None:
    rows, said = run("timeline", tmp_path, "--models", "mlp-tiny", "--rounds", "3", "--turn-ms", "20")
    assert [row["model"] for row in rows] == ["mlp-tiny"]
    (row,) = rows
    assert len(row["on_us"]) == len(row["off_us"]) == 3
    ratios = [on / off for on, off in zip(row["on_us"], row["off_us"], strict=True)]
    assert row["ratio"] == pytest.approx(statistics.median(ratios))
    assert row["events_per_step"] > 8  # of each parameter: beginnings, ends, and who is ready
    assert len(said.splitlines()) == 3
