"""The benchmark of two teams side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from example_runs import ROOT, start, whole

SCRIPT = str(ROOT / "benchmarks" / "teams.py")


@whole
def test_teams_are_timed_one_after_the_other_at_once_and_beside(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["--layouts", "2;1,1", "--sizes", "4K,64K", "--rounds", "2", "--turn-ms", "5", "--json", str(file)]
    done = start([sys.executable, SCRIPT, *words])
    rows = json.loads(file.read_text())["rows"]
    assert [(row["layout"], row["bytes"]) for row in rows] == [("2", 4096), ("2", 65536), ("1,1", 4096), ("1,1", 65536)]
    for row in rows:
        assert all(micros > 0 for key in ("after_us", "at_once_us", "beside_us") for micros in row[key])
        assert all(len(row[key]) == 2 for key in ("after_us", "at_once_us", "beside_us"))
    assert len(done.stdout.splitlines()) == 5
