"""The benchmark of the timeline: both kinds of turn are measured, and ratios are taken within rounds."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest
from example_runs import ROOT, start, whole

SCRIPT = str(ROOT / "benchmarks" / "timeline.py")


@whole
def test_steps_are_timed_with_a_timeline_and_without(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["--models", "mlp-tiny,transformer-tiny", "--rounds", "3", "--turn-ms", "20", "--json", str(file)]
    done = start([sys.executable, SCRIPT, *words])
    document = json.loads(file.read_text())
    assert document["benchmark"] == "timeline"
    assert [row["model"] for row in document["rows"]] == ["mlp-tiny", "transformer-tiny"]
    for row in document["rows"]:
        assert len(row["on_us"]) == len(row["off_us"]) == 3
        assert all(micros > 0 for micros in row["on_us"] + row["off_us"])
        assert row["ratio"] == pytest.approx(
            statistics.median(a / b for a, b in zip(row["on_us"], row["off_us"], strict=True))
        )
        assert row["events_per_step"] > 8  # of each parameter: beginnings, ends, and who is ready
    assert len(done.stdout.splitlines()) == 4
