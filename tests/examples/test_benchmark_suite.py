"""The suite runs everything, the check says ok or short by its targets, and the page says what the results say."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import cast

import pytest
from example_runs import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import allreduce
import check
import collectives
import measured
import peers
import report
import rounds
import sizes
import spaces
import suite
from contest import Contest, ContestError, Turn

FAST = rounds.AREA_BYTES / rounds.SHARING_GBS / 1e3 / 2
SLOW = FAST * 4
TINY = ("--max", "4", "--rounds", "1", "--turn-ms", "1", "--peers", "gloo")


def result_of(size: int, heats: list[tuple[float, dict[str, float]]]) -> rounds.Result:
    """A result with these heats: the probe's time before and after, and everybody's microseconds."""
    names = list(heats[0][1])
    case = rounds.Case(report.size_text(size), {"bytes": size, "dtype": "float32"})
    result = rounds.Result(case, dict.fromkeys(names, 1))
    for probe, times in heats:
        turns = {name: Turn(micros, []) for name, micros in times.items()}
        result.heats.append(rounds.Heat((probe, probe), turns))
    return result


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


def test_every_benchmark_of_the_suite_has_a_script_that_takes_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces, "why_not", lambda: "")  # words are right or wrong on every machine
    names = [benchmark.name for benchmark in suite.BENCHMARKS]
    assert len(set(names)) == len(names)
    for benchmark in suite.BENCHMARKS:
        assert (ROOT / "benchmarks" / f"{benchmark.script}.py").exists()
        if benchmark.script in ("allreduce", "collectives"):
            {"allreduce": allreduce, "collectives": collectives}[benchmark.script].parse_arguments(
                [*benchmark.words, "--json", "x"]
            )


def test_each_state_of_the_cores_is_held_to_its_own_target() -> None:
    target = sizes.Target(4 << 20, 2, {"sharing": 1.3, "apart": 4.0})
    sharing = (FAST, {"horo": 500.0, "gloo": 4000.0, "MPICH": 1000.0})
    apart = (SLOW, {"horo": 500.0, "gloo": 3000.0, "MPICH": 1000.0})
    rows = sizes.rows_for(target, result_of(4 << 20, [sharing] * 3 + [apart] * 3))
    assert [(row.target, row.ok) for row in rows] == [(">= 1.3x", True), (">= 4x", False)]
    for row in rows:
        assert (row.peer, row.ratio) == ("MPICH", pytest.approx(2.0))
        assert row.figure == pytest.approx((4 << 20) / 500.0 / 1e3)
    assert "gloo 1.05; cores share a cache" in rows[0].note


@pytest.mark.parametrize(("micros", "is_met"), [(15.0, True), (15.1, False)])
def test_a_limit_in_microseconds_is_a_limit(micros: float, is_met: bool) -> None:
    (row,) = sizes.rows_for(sizes.Target(4, 2, limit_us=15.0), result_of(4, [(FAST, {"horo": micros, "MPICH": 1.5})]))
    assert (row.figure, row.target, row.ok) == (micros, "<= 15 us", is_met)
    assert row.peer_figure == 1.5


def test_lines_of_the_check() -> None:
    row = report.CheckRow("4 MiB", 10.0, "GB/s", "MPICH", 5.0, 2.0, ">= 1.3x", True, "gloo 1.00")
    assert " ".join(check.as_line(row).split()) == "ok 4 MiB 10 GB/s MPICH 5 GB/s 2.00x >= 1.3x gloo 1.00"
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


class TwoChecks:
    """A contest of one contestant, whose results are right until it has had a turn."""

    def __init__(self) -> None:
        self.peers, self.checks, self.turns = [peers.HORO], 0, 0

    def prepare(self, *_: object) -> str:
        return ""

    def check(self, *_: object) -> str:
        self.checks += 1
        return "3 elements" if self.turns else ""

    def turn(self, *_: object, **__: object) -> Turn:
        self.turns += 1
        return Turn(5.0, [])

    def probe(self) -> float:
        return 200.0

    def forget(self, *_: object) -> None:
        """Nothing to give back."""


@pytest.mark.parametrize(("check_before", "checks"), [(True, 2), (False, 1)])
def test_results_are_checked_after_the_rounds_in_any_case(check_before: bool, checks: int) -> None:
    contest = TwoChecks()
    plan = rounds.Plan(rounds=2, calls=3, check_before=check_before)
    (result,) = rounds.play(cast(Contest, contest), "allreduce", [rounds.Case("4 B", {})], plan)
    assert (contest.checks, contest.turns) == (checks, 2)
    assert result.wrong == {"horo": "3 elements"}


@pytest.mark.parametrize(
    ("micros", "text"),
    [(0.85, "0.85 us"), (27.31, "27.3 us"), (999.4, "999 us"), (1090.0, "1.09 ms"), (999_600.0, "1.00 s")],
)
def test_times_have_three_digits(micros: float, text: str) -> None:
    assert report.time_text(micros) == text


def test_rounds_are_split_by_the_state_of_the_cores() -> None:
    states = ["sharing"] * 3 + ["apart"] * 3 + ["changing"]
    horo = {"rounds_us": [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 9.0], "states": states}
    gloo = {"rounds_us": [3.0, 3.0, 3.0, 10.0, 10.0, 10.0, 9.0], "states": states}
    assert measured.states_of([horo, gloo]) == ["sharing", "apart"]
    assert measured.ratio_of(gloo, horo, "sharing") == pytest.approx(3.0)
    assert measured.ratio_of(gloo, horo, "apart") == pytest.approx(5.0)
    assert measured.median_of(horo, "") == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is no JSON"), ("[]", "was not written by a benchmark"), ('{"rows": []}', "was not written by a benchmark")],
)
def test_a_file_that_is_no_result_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(measured.BadResults, match=message):
        measured.read_folder(tmp_path)
