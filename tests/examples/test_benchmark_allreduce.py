"""The allreduce benchmark runs, checks its sums, and computes rates by the formulas of its README."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from example_runs import ROOT, launcher, start

FOLDER = ROOT / "benchmarks"
SCRIPT = str(FOLDER / "allreduce.py")
SHORT = ["--max", "4K", "--step", "32", "--rounds", "2", "--round-ms", "1"]

sys.path.insert(0, str(FOLDER))
import allreduce  # noqa: E402  (benchmarks/allreduce.py)
import report  # noqa: E402  (benchmarks/report.py)


def test_starts_two_ranks_itself_and_writes_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = start([sys.executable, SCRIPT, *SHORT, "--json", str(file)])
    document = json.loads(file.read_text())

    assert document["ranks"] == 2
    assert [row["bytes"] for row in document["rows"]] == [4, 128, 4096]
    assert len(document["probe_us"]) == 2
    assert set(document) >= {"machine", "versions", "commit", "knobs", "options", "time"}
    for row in document["rows"]:
        for library in ("horo", "gloo"):
            assert row[library]["is_correct"]
            assert len(row[library]["rounds_us"]) == 2
            assert row[library]["min_us"] <= row[library]["median_us"] <= row[library]["max_us"]
    assert done.stdout.count(" ok\n") == 3


def test_runs_as_one_rank_under_a_launcher() -> None:
    done = start([*launcher("hororun", 1), SCRIPT, *SHORT, "--dtype", "int64"])
    assert "sum of int64, 1 rank(s)" in done.stdout


def test_rates_follow_the_formulas() -> None:
    timing = report.Timing.of(4_000_000, 4, [1000.0, 4000.0, 2000.0], iterations=5, is_correct=True)
    assert (timing.min_us, timing.median_us, timing.max_us) == (1000.0, 2000.0, 4000.0)
    assert timing.algbw == pytest.approx(2.0)  # 4 MB in 2 ms
    assert timing.busbw == pytest.approx(3.0)  # times 2 * 3 / 4
    assert timing.spread == pytest.approx(1.5)
    assert report.bus_factor(2) == 1.0
    assert report.bus_factor(1) == 0.0


def test_a_wrong_sum_shows_in_the_table() -> None:
    micros = {"horo": [1.0], "gloo": [2.0]}
    row = report.Row.of(4, 2, micros, {"horo": 1, "gloo": 1}, {"horo": False, "gloo": True})
    assert not row.is_correct
    assert row.ratio == 2.0
    assert "WRONG: horo" in report.as_table([row], 2, "float32", [])


@pytest.mark.parametrize(("text", "size"), [("4", 4), ("64K", 65536), ("64m", 64 << 20), ("2G", 2 << 30)])
def test_sizes_are_read(text: str, size: int) -> None:
    assert allreduce.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "K", "4T", "-4", "4.5M"])
def test_bad_size_is_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a size"):
        allreduce.parse_size(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--np", "0"], "--np 0: at least 1"),
        (["--rounds", "0"], "--rounds 0: at least 1"),
        (["--step", "1"], "--step 1: at least 2"),
        (["--min", "8", "--max", "4"], "--max 4 is below --min 8"),
    ],
)
def test_bad_option_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        allreduce.parse_arguments(words)
    assert message in capsys.readouterr().err
