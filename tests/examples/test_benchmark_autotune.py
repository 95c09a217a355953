"""The benchmark of autotuning runs its four jobs, and says what they ran with."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
from example_runs import ROOT, start, whole

FOLDER = ROOT / "benchmarks"

sys.path.insert(0, str(FOLDER))
import autotune  # noqa: E402  (benchmarks/autotune.py)
import spaces  # noqa: E402  (benchmarks/spaces.py)


@pytest.mark.skipif(bool(spaces.why_not()), reason=spaces.why_not())
@whole
def test_four_jobs_are_measured(tmp_path: Path) -> None:
    file, log = tmp_path / "out.json", tmp_path / "autotune.csv"
    words = ["--steps", "3", "--max-samples", "3", "--json", str(file), "--log", str(log)]
    done = start([sys.executable, str(FOLDER / "autotune.py"), *words])
    rows = json.loads(file.read_text())["rows"]
    assert [row["job"] for row in rows] == list(autotune.JOBS)
    assert all(len(row["seconds"]) == 3 and min(row["seconds"]) > 0 for row in rows)
    assert [row["before"] > 0 for row in rows] == [False, False, True, True]
    assert rows[3]["values"].keys() == {*rows[2]["values"]} != set()
    assert done.stdout.count(" / ") >= 8
    samples = list(csv.DictReader(log.open()))
    assert samples[1]["segment_bytes"] == autotune.BAD["HORO_SEGMENT_BYTES"]
    assert samples[-1]["stage"] == "best"
