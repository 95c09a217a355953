"""Benchmarks check what they measure, end in order or with a sentence, and compute by the formulas of their README."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import allreduce
import autotune
import check
import collectives
import contest
import distributed_step
import footprint
import idle
import models
import peers
import psutil
import pytest
import report
import rounds
import spaces
import startup
import suite
import torch
import two_hosts
import wakes
from contest import ContestError, Turn
from devices import CPU
from example_runs import LIMIT_SECONDS, ROOT, start, why_gloo_cannot
from jobs import TORCH_S, wait_until
from skips import whole
from workloads import training_step as workload

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


def test_measures_two_libraries_and_writes_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "made" / "out.json"
    done = start(
        [sys.executable, str(FOLDER / "allreduce.py"), *f"{QUICK} --max 4K --step 32".split(), "--json", str(file)]
    )
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


def test_messages_and_hops_are_those_of_a_tree(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["--layouts", "1x3,2x1,3x2,8x1", "--tensors", "1,3", "--rounds", "2", "--json", str(file)]
    done = start([sys.executable, str(FOLDER / "negotiation.py"), *words])
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


@pytest.mark.parametrize(("check_before", "checks"), [(True, 2), (False, 1)])
def test_results_are_checked_after_the_rounds_in_any_case(check_before: bool, checks: int) -> None:
    """In a contest of one contestant, whose results are right until it has had a turn."""
    contest = Mock(peers=[peers.HORO])
    contest.prepare.return_value, contest.probe.return_value, contest.turn.return_value = "", 200.0, Turn(5.0, [])
    contest.check.side_effect = lambda *_: "3 elements" if contest.turn.called else ""
    plan = rounds.Plan(rounds=2, calls=3, check_before=check_before)
    (result,) = rounds.play(contest, "allreduce", [rounds.Case("4 B", {})], plan)
    assert (contest.check.call_count, contest.turn.call_count) == (checks, 2)
    assert result.wrong == {"horo": "3 elements"}


QUICK = "--rounds 2 --turn-ms 1 --peers horo,gloo"
ON_CPU = "--device cpu --rounds 1 --turn-ms 1"


def run(script: str, folder: Path, *words: str) -> tuple[list[dict[str, Any]], str]:
    """The rows that it has written, and what it has printed."""
    file = folder / "out.json"
    said = start([sys.executable, str(FOLDER / f"{script}.py"), *words, "--json", str(file)]).stdout
    return json.loads(file.read_text())["rows"], said


MOVES = ("reducescatter", "alltoall", "allgather", "broadcast")
KEPT = "ceiling, memory kept"
LAYOUTS = "--layouts 2;1,1 --sizes 4K,64K --rounds 2 --turn-ms 5"
BY_LAYOUT = [("2", 4096), ("2", 65536), ("1,1", 4096), ("1,1", 65536)]
TREES = "TREE TREE --rounds 2"
RUNS: dict[str, tuple[str, str, list[tuple[Any, ...]], int]] = {
    # the script and its words: columns of its rows, what they hold, and how many lines end with "ok"
    "autotune --steps 3 --max-samples 3": ("job", [(job,) for job in autotune.JOBS], 0),
    f"teams {LAYOUTS}": ("layout bytes", BY_LAYOUT, 0),
    "timeline --models mlp-tiny --rounds 3 --turn-ms 20": ("model", [("mlp-tiny",)], 0),
    "timeline --of stats --models mlp-tiny --rounds 3 --turn-ms 20": ("model", [("mlp-tiny",)], 0),
    "elastic_commit --model resnet50-tiny --batch 2 --rounds 2 --steps 1": ("model", [("resnet50-tiny",)], 0),
    "elastic_kills --hosts 1 --peers horo --kills 3": (
        "victim moment",
        [("rank 0", "step"), ("another", "step"), ("rank 0", "sync"), ("none", "a newcomer joins")],
        0,
    ),
    f"collectives {QUICK} --max 4K --step 1024": (
        "operation bytes contestant",
        [(o, size, who) for o in MOVES for size in (4 if o == "broadcast" else 8, 4096) for who in ("horo", "gloo")],
        16,
    ),
    f"allreduce {QUICK} --max 4K --step 32 --hosts 2 --rate 1gbit": (
        "bytes contestant",
        [(size, who) for size in (4, 128, 4096) for who in ("horo", "gloo")],
        6,
    ),
    f"training_step {QUICK} --models mlp-tiny": (
        "contestant",
        [(who,) for who in ("ceiling", KEPT, f"{KEPT}, in step", "horo", "gloo", "gloo, memory kept")],
        6,
    ),
    "sharded_step --rounds 2 --turn-ms 1 --models mlp-tiny --optimizers sgd,adam": (
        "case contestant",
        [
            (f"mlp-tiny {kind}", who)
            for kind in ("sgd", "adam")
            for who in (f"{KEPT}, in step", "horo", "horo, sharded")
        ],
        6,
    ),
    "distributed_step --rounds 2 --turn-ms 1 --models mlp-tiny,resnet50-tiny --bucket-mb 1": (
        "model way contestant",
        [
            (model, way, who)
            for model in ("mlp-tiny", "resnet50-tiny")
            for way in ("ddp", "views", "fsdp2", "zero")
            for who in (("horo dist", "gloo", "horo") if way in ("ddp", "views") else ("horo dist", "gloo"))
        ],
        20,
    ),
    f"small_tensors {QUICK} --tensors 20 --size 64": (
        "form contestant",
        [("single", "horo"), ("single", "gloo"), ("grouped", "horo")],
        0,
    ),
    f"latency {QUICK} --peers horo,horo-dist,gloo --max 4": (
        "form contestant",
        [("complete", who) for who in ("horo", "horo dist", "gloo")] + [("submit", "horo"), ("poll", "horo")],
        0,
    ),
    "two_hosts --hosts 2 --per-host 1,2 --rates 1gbit --size 64K --rounds 2": (
        "per_host contestant right",
        [(per_host, who, True) for per_host in (1, 2) for who in two_hosts.CONTESTANTS],
        8,
    ),
    f"gpu_step {ON_CPU} --models mlp-tiny,transformer-tiny": (
        "model contestant",
        [(m, who) for m in ("mlp-tiny", "transformer-tiny") for who in ("ceiling", "ceiling, again", "horo", "DDP")],
        8,
    ),
    f"gpu_gradients {ON_CPU} --np 2 --model transformer-tiny": (
        "form contestant",
        [(form, who) for form in ("grouped", "optimizer") for who in ("ceiling", "horo", "DDP")],
        0,
    ),
    f"gpu_staging {ON_CPU} --sizes 4K,16M --model mlp-tiny": (
        "ranks case contestant",
        [(n, c, who) for n in (1, 2) for c in ("4 KiB", "16 MiB", "4 gradients") for who in ("ceiling", "horo")],
        0,
    ),
    f"builds {TREES} --layouts 2;1,1 --sizes 4K,64K --turn-ms 5 --models=": ("layout bytes", BY_LAYOUT, 0),
    f"builds {TREES} --layouts= --models mlp-tiny --step-turn-ms 5": ("model", [("mlp-tiny",)], 0),
    "wakes TREE TREE --rounds 1 --calls 80 --traced-calls 0 --seconds 0.1": (
        "situation",
        [(situation.name,) for situation in wakes.SITUATIONS for _ in range(3)],
        0,
    ),
}


@whole
@pytest.mark.parametrize("command", RUNS)
def test_a_benchmark_writes_a_row_for_each_case(tree: Path, tmp_path: Path, command: str) -> None:
    columns, expected, oks = RUNS[command]
    script, *words = command.replace("TREE", str(tree)).split()
    if (script == "autotune" or "--hosts" in words) and (why := spaces.why_not()):
        pytest.skip(why)
    if script == "collectives" and (why := why_gloo_cannot("reducescatter")):
        pytest.skip(why)
    rows, said = run(script, tmp_path, *words)
    assert [tuple(row[column] for column in columns.split()) for row in rows] == expected
    assert all(row.get("wrong", "") == "" for row in rows)
    assert said.count(" ok\n") >= oks


def test_a_rank_that_learns_something_else_is_found() -> None:
    class Broken(workload._AloneHere):
        kind = "horo"
        size = 2

        class module:
            @staticmethod
            def DistributedOptimizer(optimizer: object, named_parameters: object) -> object:
                return optimizer  # forgets the other rank

            @staticmethod
            def broadcast_parameters(state: object, root_rank: int) -> None:
                """All ranks begin alike."""

    assert "off after moving" in workload.check_learning(Broken(), models.RECIPES["mlp-tiny"], CPU)


@whole
def test_startup_measures_every_part(tmp_path: Path) -> None:
    written, _ = run("startup", tmp_path, "--rounds", "1", "--warm-up", "0")
    rows = {row["what"]: row for row in written}
    assert {target.what for target in startup.TARGETS} <= set(rows)
    assert all(len(row["rounds_ms"]) == 1 and row["rounds_ms"][0] > 0 for row in written)
    for launcher, library in (("hororun", "horo"), ("torchrun", "gloo")):
        parts = (f"{launcher} to the first line", f"{launcher}, imports", f"{launcher}, {library} init")
        total = rows[f"{launcher} to ready"]["median_ms"]
        assert sum(rows[part]["median_ms"] for part in parts) == pytest.approx(total, abs=0.1)


@whole
def test_idle_counts_nothing_for_horo(tmp_path: Path) -> None:
    rows = {row["job"]: row for row in run("idle", tmp_path, "--seconds", "0.5")[0]}
    assert set(rows) == set(idle.JOBS)
    assert rows["horo, one host"]["connections"] == 0
    assert rows["horo, a host per rank"]["connections"] == 4  # one for agreement and one for data, seen from both ends
    assert [rows[name]["packets"] for name in idle.OURS] == [0] * len(idle.OURS)


@whole
def test_footprint_keeps_its_promise(tmp_path: Path) -> None:
    rows, _ = run("footprint", tmp_path)
    assert {row["place"] for row in rows} == set(footprint.PLACES)
    for row in rows:
        assert row["extra_bytes"] == max(row["by_rank_bytes"])
        assert row["allowed_bytes"] == (16 << 20) + 2 * row["in_flight_bytes"] >= row["extra_bytes"], row


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Another tree, which is this one."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / ".venv").symlink_to(Path(sys.executable).parent.parent)  # whole: a Python finds its packages beside itself
    for name in ("tests", "horo", "runner"):
        (tree / name).symlink_to(ROOT / name)
    return tree


def test_calls_in_a_log_of_strace_are_those_between_the_marks_of_their_rank() -> None:
    mark = 'access("wakes {}", F_OK) = -1 ENOENT (No such file or directory)'
    lines = [
        "10 read(3, 0x1, 8) = 8",
        f"10 {mark.format('begin')}",
        "10 ppoll([{fd=4}], 1, NULL, NULL, 8 <unfinished ...>",
        "20 read(3, 0x1, 8) = 8",
        "11 write(4, 0x1, 8) = 8",
        "10 <... ppoll resumed>) = 1",
        "10 --- SIGCHLD {si_signo=SIGCHLD} ---",
        *(f"{rank} {mark.format(word)}" for rank, word in ((20, "begin"), (10, "end"))),
        *("20 sendmsg(5, 0x1, 0) = 4", "11 write(4, 0x1, 8) = 8", "30 write(4, 0x1, 8) = 8"),
    ]
    assert wakes.count_calls(lines, [[10, 11], [20]]) == 3


@whole
def test_ranks_that_share_a_place_train_to_the_parameters_of_one(tmp_path: Path) -> None:
    rows, said = run("gpu_shared", tmp_path, *ON_CPU.split(), "--model", "resnet50-tiny", "--batch", "4")
    assert [(row["ranks"], row["contestant"], row["wrong"]) for row in rows] == [(2, "ceiling", ""), (2, "horo", "")]
    assert said.splitlines()[-1].startswith("ok    resnet50-tiny on one GPU, 2 ranks")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here; `make gpu-bench` runs the scripts on it")
def test_without_a_gpu_a_script_says_so_and_ends_well(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = start([sys.executable, str(FOLDER / "gpu_step.py"), "--json", str(file)])
    assert done.stdout == f"gpu_step.py: skipped: no GPU: torch {torch.__version__} sees none\n"
    assert not file.exists()
