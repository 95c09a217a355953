"""The benchmarks of startup, idleness and memory run, and what must be nothing is nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from example_runs import ROOT, start, whole

FOLDER = ROOT / "benchmarks"

sys.path.insert(0, str(FOLDER))
import footprint  # noqa: E402  (benchmarks/footprint.py)
import idle  # noqa: E402  (benchmarks/idle.py)
import launching  # noqa: E402  (benchmarks/launching.py)
import startup  # noqa: E402  (benchmarks/startup.py)
from contest import ContestError  # noqa: E402  (benchmarks/contest.py)


@whole
def test_startup_measures_every_part(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["--rounds", "1", "--warm-up", "0", "--json", str(file)]
    start([sys.executable, str(FOLDER / "startup.py"), *words])
    document = json.loads(file.read_text())

    assert document["benchmark"] == "startup"
    rows = {row["what"]: row for row in document["rows"]}
    assert {target.what for target in startup.TARGETS} <= set(rows)
    for row in rows.values():
        assert len(row["rounds_ms"]) == 1
        assert row["rounds_ms"][0] > 0
    for launcher, library in (("hororun", "horo"), ("torchrun", "gloo")):
        parts = (f"{launcher} to the first line", f"{launcher}, imports", f"{launcher}, {library} init")
        whole = rows[f"{launcher} to ready"]["median_ms"]
        assert sum(rows[part]["median_ms"] for part in parts) == pytest.approx(whole, abs=0.1)


@whole
def test_idle_counts_nothing_for_horo(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    start([sys.executable, str(FOLDER / "idle.py"), "--seconds", "0.5", "--json", str(file)])
    rows = {row["job"]: row for row in json.loads(file.read_text())["rows"]}

    assert set(rows) == set(idle.JOBS)
    assert rows["horo, one host"]["connections"] == 0
    assert rows["horo, a host per rank"]["connections"] == 4  # one for agreement and one for data, seen from both ends
    for name in idle.OURS:
        assert rows[name]["packets"] == 0


@whole
def test_footprint_keeps_its_promise(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    start([sys.executable, str(FOLDER / "footprint.py"), "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]

    assert {row["place"] for row in rows} == set(footprint.PLACES)
    for row in rows:
        assert len(row["by_rank_bytes"]) == 2
        assert row["extra_bytes"] == max(row["by_rank_bytes"])
        assert row["allowed_bytes"] == (16 << 20) + 2 * row["in_flight_bytes"]
        assert row["extra_bytes"] <= row["allowed_bytes"], row


def test_a_job_that_hangs_is_ended() -> None:
    with pytest.raises(ContestError, match=r"no end after 0.2 s"):
        launching.run([sys.executable, "-c", "import threading; threading.Event().wait()"], limit_s=0.2)
