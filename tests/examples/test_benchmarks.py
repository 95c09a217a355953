"""Benchmarks check what they measure, end in order or with a sentence, and compute by the formulas of their README."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import allreduce
import check
import collectives
import contest
import distributed_step
import peers
import psutil
import pytest
import report
import rounds
import spaces
import suite
from contest import Contest, ContestError, Turn
from example_runs import LIMIT_SECONDS, ROOT, start
from jobs import TORCH_S, wait_until
from skips import whole

FOLDER = ROOT / "benchmarks"


SOLO = peers.Peer("solo", "bare")
LONG = [sys.executable, str(FOLDER / "allreduce.py"), "--peers", "horo"]
LONG += ["--max", "4", "--rounds", "100000", "--turn-ms", "1"]


def solo(turn_limit_s: float = contest.TURN_LIMIT_S) -> contest.Contest:
    """Two ranks without any library, beside the probe's."""
    return contest.Contest([SOLO], 2, turn_limit_s=turn_limit_s)


def contestants_of(process: int, name: str = "") -> list[psutil.Process]:
    """The rank processes of one contestant (of all) among the descendants of a driver."""
    found = []
    for child in psutil.Process(process).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = child.cmdline()
            if any(word.endswith("contestant.py") for word in words[:2]) and (not name or name in words):
                found.append(child)
    return found


def has_begun(process: int) -> bool:
    """Whether rounds are being played: the probe sleeps before each of its turns, and seldom otherwise."""
    ranks = contestants_of(process, "probe")
    return bool(ranks) and ranks[0].num_ctx_switches().voluntary > 60


@pytest.fixture
def benchmark() -> Iterator[subprocess.Popen[str]]:
    """A benchmark that would run for a long time; its rounds have begun."""
    with subprocess.Popen(LONG, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        try:
            wait_until(lambda: driver.poll() is not None or has_begun(driver.pid), "rounds", deadline_s=TORCH_S)
            assert driver.poll() is None, driver.communicate()
            assert len(contestants_of(driver.pid)) == 4
            yield driver
        finally:
            driver.kill()


def end_of(driver: subprocess.Popen[str], left: list[psutil.Process]) -> tuple[int, str]:
    """Exit code and stderr, once the driver has ended; none of ``left`` may be there after it."""
    _, errors = driver.communicate(timeout=LIMIT_SECONDS)
    wait_until(lambda: not any(process.is_running() for process in left), f"{left} are gone")
    return driver.returncode, errors


@pytest.mark.parametrize("name", ["horo", pytest.param("probe", marks=whole)])
def test_a_killed_rank_ends_the_contest_with_a_sentence(benchmark: subprocess.Popen[str], name: str) -> None:
    everybody = psutil.Process(benchmark.pid).children(recursive=True)
    victim = contestants_of(benchmark.pid, name)[1]
    victim.kill()
    code, errors = end_of(benchmark, everybody)
    assert code == 1
    assert errors.startswith("allreduce.py: ")
    assert f"of {name} (process {victim.pid}) died" in errors or f"{name} ended with code" in errors


def test_a_turn_over_its_deadline_names_who_has_not_answered() -> None:
    expected = r"solo has not done prepare 'x' within 0\.5 s: ranks 0, 1 did not answer"
    with pytest.raises(contest.ContestError, match=expected), solo(turn_limit_s=0.5) as benchmark:
        for rank in contestants_of(os.getpid(), "solo"):
            rank.suspend()
        benchmark.prepare(SOLO, "probe", "x", {"descriptor": -1})


def test_ratios_are_taken_within_heats_and_by_state() -> None:
    fast = rounds.AREA_BYTES / rounds.SHARING_GBS / 1e3 / 2
    slow = fast * 4
    result = rounds.Result(rounds.Case("x", {}), {"horo": 1, "gloo": 1})
    for probes, horo, gloo in [
        ((fast, fast), 10.0, 20.0),
        ((fast, fast), 100.0, 400.0),
        ((slow, slow), 10.0, 90.0),
        ((fast, slow), 10.0, 10.0),
    ]:
        result.heats.append(rounds.Heat(probes, {"horo": contest.Turn(horo, []), "gloo": contest.Turn(gloo, [])}))
    assert result.states() == {"sharing": 2, "apart": 1, "changing": 1}
    assert result.ratio("gloo", state="sharing") == pytest.approx(3.0)
    assert result.ratio("gloo", state="apart") == pytest.approx(9.0)
    assert result.ratio("gloo") == pytest.approx(3.0)
    assert result.ratio("MPICH") is None
    assert result.median("horo", "sharing") == pytest.approx(55.0)


def test_steps_through_torch_distributed_are_judged_beside_gloo_and_horos_optimizer() -> None:
    def result_of(times: dict[str, list[float]], learnt: dict[str, float]) -> rounds.Result:
        result = rounds.Result(rounds.Case("x", {}), dict.fromkeys(times, 1))
        for heat in zip(*times.values(), strict=True):
            turns = {
                name: contest.Turn(micros, [{"figures": {"learnt": learnt[name]}}])
                for name, micros in zip(times, heat, strict=True)
            }
            result.heats.append(rounds.Heat((1.0, 1.0), turns))
        distributed_step.compare_learning(result)
        return result

    same = {"horo dist": 2.0, "gloo": 2.0001, "horo": 2.0}
    good = result_of({"horo dist": [10.0] * 3, "gloo": [9.0, 11.0, 12.0], "horo": [9.7, 9.6, 9.8]}, same)
    assert (good.wrong, distributed_step.verdicts_of(good)) == ({}, {"gloo": "ok", "horo": "ok"})
    even = result_of({"horo dist": [10.0] * 3, "gloo": [9.0, 9.9, 12.0], "horo": [10.0] * 3}, same)
    assert distributed_step.verdicts_of(even) == {"gloo": "even", "horo": ""}
    bad = result_of({"horo dist": [10.0] * 3, "gloo": [9.0] * 3, "horo": [8.0] * 3}, {**same, "gloo": 2.1})
    assert distributed_step.verdicts_of(bad) == {"gloo": "short", "horo": "short"}
    assert list(bad.wrong) == ["gloo"]
    assert "moved the parameters by 2.1, those of horo dist by 2" in bad.wrong["gloo"]


ALLREDUCE = str(FOLDER / "allreduce.py")
SHORT = ["--max", "4K", "--step", "32", "--rounds", "2", "--turn-ms", "1", "--peers", "horo,gloo"]


def test_measures_two_libraries_and_writes_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "made" / "out.json"
    done = start([sys.executable, ALLREDUCE, *SHORT, "--json", str(file)])
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


NEGOTIATION = str(FOLDER / "negotiation.py")


def test_messages_and_hops_are_those_of_a_tree(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["--layouts", "1x3,2x1,3x2,8x1", "--tensors", "1,3", "--rounds", "2", "--json", str(file)]
    done = start([sys.executable, NEGOTIATION, *words])
    document = json.loads(file.read_text())

    assert document["benchmark"] == "negotiation"
    assert document["options"] == {"layouts": ["1x3", "2x1", "3x2", "8x1"], "tensors": [1, 3], "rounds": 2}
    rows = document["rows"]
    assert [(row["ranks"], row["tensors"], row["kind"]) for row in rows] == [
        (ranks, tensors, kind) for ranks in (3, 2, 6, 8) for tensors in (1, 3) for kind in ("first", "cached")
    ]
    hops = {1: 0, 2: 2, 3: 2, 8: 6}  # of 3 hosts, two are children of the first
    most = {1: 0, 2: 1, 3: 2, 8: 3}
    for row in rows:
        hosts = row["hosts"]
        if row["tensors"] == 1:
            assert row["messages"] == 2 * (hosts - 1)
            assert row["messages_most"] == most[hosts]
            assert row["hops"] == hops[hosts] <= row["hops_bound"]
        assert row["messages"] >= 2 * (hosts - 1)
        assert (row["wire_bytes"] > 0) == (hosts > 1)
        assert len(row["latencies_us"]) == (1 if row["kind"] == "first" else 2)
        assert isinstance(row["memory_used_bytes"], int)  # of a few ranks it drowns in what the process frees meanwhile
    by_kind = {(row["hosts"], row["kind"]): row["wire_bytes"] for row in rows if row["tensors"] == 1}
    assert all(by_kind[hosts, "cached"] < by_kind[hosts, "first"] for hosts in (2, 3, 8))
    assert done.stderr == ""


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
