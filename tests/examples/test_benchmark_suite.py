"""The suite runs everything, and the check says ok or short by its targets."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
from example_runs import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import allreduce
import check
import report
import rounds
import suite
from contest import ContestError, Turn

FAST = rounds.AREA_BYTES / rounds.SHARING_GBS / 1e3 / 2
SLOW = FAST * 4
TINY = ("--max", "4", "--rounds", "1", "--turn-ms", "1", "--peers", "gloo")


def result_of(size: int, heats: list[tuple[float, dict[str, float]]]) -> rounds.Result:
    """A result with these heats: the probe's time before and after, and everybody's microseconds."""
    names = list(heats[0][1])
    case = rounds.Case(report.size_text(size), {"bytes": size, "dtype": "float32"})
    result = rounds.Result(case, dict.fromkeys(names, 1))
    for probe, times in heats:
        turns = {name: Turn(micros, [NOTHING_COUNTED]) for name, micros in times.items()}
        result.heats.append(rounds.Heat((probe, probe), turns))
    return result


NOTHING_COUNTED = {"cpu_s": 0.0, "switches_voluntary": 0, "switches_forced": 0, "page_faults": 0}


# ---- suite -----------------------------------------------------------------------------------------------------------


def test_the_suite_goes_on_after_a_failure_and_keeps_no_old_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = suite.Benchmark("broken", "allreduce", ("--np", "0"))
    fine = suite.Benchmark("fine", "allreduce", TINY)
    monkeypatch.setattr(suite, "BENCHMARKS", (broken, fine))
    (tmp_path / "broken.json").write_text("of an earlier run")
    assert suite.run(argparse.Namespace(names=[], out=tmp_path)) == 1
    output = capfd.readouterr()
    assert "--np 0: at least 1" in output.err
    assert "suite.py: broken failed" in output.err
    assert "in-place sum of float32" in output.out
    assert [path.name for path in tmp_path.iterdir()] == ["fine.json"]


def test_every_benchmark_of_the_suite_has_a_script_that_takes_its_words() -> None:
    names = [benchmark.name for benchmark in suite.BENCHMARKS]
    assert len(set(names)) == len(names)
    for benchmark in suite.BENCHMARKS:
        assert (ROOT / "benchmarks" / f"{benchmark.script}.py").exists()
        if benchmark.script == "allreduce":
            allreduce.parse_arguments([*benchmark.words, "--json", "x"])


@pytest.mark.parametrize("parse", [suite.parse_arguments, check.parse_arguments])
def test_an_unknown_benchmark_is_named(parse: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["alreduce"])
    assert "'alreduce'" in capsys.readouterr().err


# ---- check -----------------------------------------------------------------------------------------------------------


def test_each_state_of_the_cores_is_held_to_its_own_target() -> None:
    target = allreduce.Target(4 << 20, 2, {"sharing": 1.3, "apart": 4.0})
    sharing = (FAST, {"horo": 500.0, "gloo": 4000.0, "MPICH": 1000.0})
    apart = (SLOW, {"horo": 500.0, "gloo": 3000.0, "MPICH": 1000.0})
    rows = allreduce.rows_for(target, result_of(4 << 20, [sharing] * 3 + [apart] * 3))
    assert [(row.target, row.ok) for row in rows] == [(">= 1.3x", True), (">= 4x", False)]
    for row in rows:
        assert (row.peer, row.ratio) == ("MPICH", pytest.approx(2.0))
        assert row.figure == pytest.approx((4 << 20) / 500.0 / 1e3)
    assert "gloo 1.05; cores share a cache" in rows[0].note


def test_a_state_of_two_rounds_is_not_spoken_of() -> None:
    target = allreduce.Target(4 << 20, 2, {"sharing": 1.3, "apart": 4.0})
    times = {"horo": 500.0, "gloo": 1000.0}
    (row,) = allreduce.rows_for(target, result_of(4 << 20, [(FAST, times)] * 3 + [(SLOW, times)] * 2))
    assert (row.target, row.ok) == (">= 1.3x", True)
    (row,) = allreduce.rows_for(target, result_of(4 << 20, [(FAST, times)] * 2 + [(SLOW, times)] * 2))
    assert (row.target, row.ok) == (">= 4x", False)  # neither is certain: the harder one


@pytest.mark.parametrize(("micros", "is_met"), [(15.0, True), (15.1, False)])
def test_a_limit_in_microseconds_is_a_limit(micros: float, is_met: bool) -> None:
    (row,) = allreduce.rows_for(
        allreduce.Target(4, 2, limit_us=15.0), result_of(4, [(FAST, {"horo": micros, "MPICH": 1.5})])
    )
    assert (row.figure, row.target, row.ok) == (micros, "<= 15 us", is_met)
    assert row.peer_figure == 1.5


def test_without_peers_a_ratio_is_short_and_nothing_is_compared() -> None:
    target = allreduce.Target(64 << 20, 2, {"sharing": 3.5, "apart": 3.5})
    (row,) = allreduce.rows_for(target, result_of(64 << 20, [(FAST, {"horo": 6000.0})] * 3))
    assert (row.peer, row.peer_figure, row.ratio, row.ok) == ("", None, None, False)
    assert "GB/s" in check.as_line(row)


def test_lines_of_the_check() -> None:
    row = report.CheckRow("4 MiB", 10.0, "GB/s", "MPICH", 5.0, 2.0, ">= 1.3x", True, "gloo 1.00")
    assert check.as_line(row).split() == [
        "ok",
        "4",
        "MiB",
        "10",
        "GB/s",
        "MPICH",
        "5",
        "GB/s",
        "2.00x",
        ">=",
        "1.3x",
        "gloo",
        "1.00",
    ]
    row = report.CheckRow("idle", 0, "", "", None, None, "= 0", False)
    assert " ".join(check.as_line(row).split()) == "short idle 0 = 0"
    assert check.summary([row]) == "1 targets: 0 ok, 1 short"


def test_the_check_exits_with_0_when_short_and_1_when_something_broke(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = report.CheckRow("4 B", 30.0, "us", "", None, None, "<= 15 us", False)
    monkeypatch.setattr(allreduce, "check_rows", lambda quick: [short] if quick else [])
    arguments = argparse.Namespace(names=["allreduce"], full=False)
    assert check.run(arguments) == 0
    assert "short 4 B" in capsys.readouterr().out

    def breaks(quick: bool) -> list[report.CheckRow]:
        raise ContestError(f"rank 1 of gloo died; quick: {quick}")

    monkeypatch.setattr(allreduce, "check_rows", breaks)
    assert check.run(arguments) == 1
    assert "check.py: allreduce: rank 1 of gloo died; quick: True" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("micros", "text"),
    [(0.85, "0.85 us"), (27.31, "27.3 us"), (999.4, "999 us"), (1090.0, "1.09 ms"), (999_600.0, "1.00 s")],
)
def test_times_have_three_digits(micros: float, text: str) -> None:
    assert report.time_text(micros) == text
