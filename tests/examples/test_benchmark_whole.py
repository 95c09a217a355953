"""Benchmarks that start many ranks write down what they measured; and what reads traces of calls."""

from __future__ import annotations

import csv
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from example_runs import ROOT, start, whole, why_gloo_cannot

FOLDER = ROOT / "benchmarks"
sys.path.insert(0, str(FOLDER))
import autotune  # noqa: E402  (benchmarks/autotune.py)
import call_trace  # noqa: E402  (benchmarks/call_trace.py)
import footprint  # noqa: E402  (benchmarks/footprint.py)
import idle  # noqa: E402  (benchmarks/idle.py)
import launching  # noqa: E402  (benchmarks/launching.py)
import models  # noqa: E402  (benchmarks/models.py)
import spaces  # noqa: E402  (benchmarks/spaces.py)
import startup  # noqa: E402  (benchmarks/startup.py)
import wakes  # noqa: E402  (benchmarks/wakes.py)
from contest import ContestError  # noqa: E402  (benchmarks/contest.py)
from devices import CPU  # noqa: E402  (benchmarks/devices.py)
from workloads import training_step as workload  # noqa: E402  (benchmarks/workloads/training_step.py)

SHORT = ["--rounds", "2", "--turn-ms", "1", "--peers", "horo,gloo"]


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


@whole
def test_all_collectives_are_measured(tmp_path: Path) -> None:
    if why := why_gloo_cannot("reducescatter"):
        pytest.skip(why)
    rows, said = run("collectives", tmp_path, *SHORT, "--max", "4K", "--step", "1024")
    assert [(row["operation"], row["bytes"], row["contestant"]) for row in rows] == [
        (operation, size, name)
        for operation in ("reducescatter", "alltoall", "allgather", "broadcast")
        for size in (4 if operation == "broadcast" else 8, 4096)
        for name in ("horo", "gloo")
    ]
    assert all(row["wrong"] == "" and len(row["rounds_us"]) == 2 for row in rows)
    assert said.count(" ok\n") == 16


@whole
@pytest.mark.skipif(bool(spaces.why_not()), reason=spaces.why_not())
def test_contestants_are_spread_over_hosts(tmp_path: Path) -> None:
    words = ["--max", "4K", "--step", "32", "--hosts", "2", "--rate", "1gbit"]
    _, said = run("allreduce", tmp_path, *SHORT, *words)
    assert said.startswith("allreduce, in-place sum of float32, 2 ranks on 2 hosts, links of 1gbit; ")
    assert said.count(" ok\n") == 6


@whole
def test_a_training_step_is_measured_beside_all_ceilings(tmp_path: Path) -> None:
    rows, said = run("training_step", tmp_path, *SHORT, "--models", "mlp-tiny")
    kept = "ceiling, memory kept"
    names = ["ceiling", kept, f"{kept}, in step", "horo", "gloo", "gloo, memory kept"]
    assert [(row["model"], row["contestant"]) for row in rows] == [("mlp-tiny", name) for name in names]
    assert all(row["wrong"] == "" and row["cpu_ms_per_rank"] > 0 for row in rows)
    assert [row["efficiency"] for row in rows if row["contestant"] == "ceiling"] == [1.0]
    assert said.count(" ok\n") == 6


@whole
def test_small_tensors_are_summed_both_ways(tmp_path: Path) -> None:
    rows, _ = run("small_tensors", tmp_path, *SHORT, "--tensors", "20", "--size", "64")
    seen = [(row["form"], row["contestant"], row["wrong"]) for row in rows]
    assert seen == [("single", "horo", ""), ("single", "gloo", ""), ("grouped", "horo", "")]
    assert all((row["submit_us"] > 0) == (row["form"] == "single") for row in rows)


@whole
def test_latency_keeps_the_time_of_single_calls(tmp_path: Path) -> None:
    rows, _ = run("latency", tmp_path, *SHORT, "--max", "4")
    seen = [(row["form"], row["contestant"]) for row in rows]
    assert seen == [("complete", "horo"), ("complete", "gloo"), ("submit", "horo"), ("poll", "horo")]
    assert all(row["call_min_us"] <= row["call_median_us"] <= row["call_p99_us"] for row in rows)


def test_models_are_what_their_names_say() -> None:
    def counts(model: torch.nn.Module) -> tuple[int, int]:
        parameters = list(model.parameters())
        return len(parameters), sum(parameter.numel() for parameter in parameters)

    assert counts(models.resnet50()) == (161, 25_557_032)  # as torchvision's
    assert counts(models.RECIPES["mlp"].make()) == (48, 24 * (1024 * 1024 + 1024))


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


def test_a_job_that_hangs_is_ended() -> None:
    with pytest.raises(ContestError, match=r"no end after 0.2 s"):
        launching.run([sys.executable, "-c", "import threading; threading.Event().wait()"], limit_s=0.2)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Another tree, which is this one."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / ".venv").symlink_to(Path(sys.executable).parent.parent)  # whole: a Python finds its packages beside itself
    for name in ("tests", "horo", "runner"):
        (tree / name).symlink_to(ROOT / name)
    return tree


@whole
def test_calls_of_a_tree_beside_itself(tree: Path, tmp_path: Path) -> None:
    words = ["--layouts", "2;1,1", "--sizes", "4,64K", "--rounds", "2", "--turn-ms", "5", "--models", ""]
    rows, said = run("builds", tmp_path, str(tree), str(tree), *words)
    assert [(row["layout"], row["bytes"]) for row in rows] == [("2", 4), ("2", 65536), ("1,1", 4), ("1,1", 65536)]
    assert all(len(row["before_us"]) == len(row["after_us"]) == 2 for row in rows)
    assert all(micros > 0 for row in rows for micros in row["before_us"] + row["after_us"])
    assert len(said.splitlines()) == 5


@whole
def test_the_training_step_of_a_tree_beside_itself(tree: Path, tmp_path: Path) -> None:
    words = ["--layouts", "", "--rounds", "2", "--models", "mlp-tiny", "--step-turn-ms", "5"]
    (row,), said = run("builds", tmp_path, str(tree), str(tree), *words)
    for name in ("before", "after"):
        assert len(row[f"{name}_us"]) == 2
        assert min(*row[f"{name}_us"], row[f"{name}_share"], row[f"{name}_cpu_ms"]) > 0
    assert row["model"] == said.splitlines()[-1].split()[0] == "mlp-tiny"


@whole
def test_wake_ups_of_a_tree_beside_itself(tree: Path, tmp_path: Path) -> None:
    words = ["--rounds", "1", "--calls", "80", "--traced-calls", "0", "--seconds", "0.1"]
    rows, _ = run("wakes", tmp_path, str(tree), str(tree), *words)
    assert [row["situation"] for row in rows[::3]] == [situation.name for situation in wakes.SITUATIONS]
    assert all(len(row["before"]) == len(row["after"]) == 1 for row in rows)


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


def test_figures_of_a_trace_of_calls() -> None:
    entered = (("run", "context.c"), ("add", "base/map.c"), ("find", "base/map.c"), ("run", "context.c"))
    trace = call_trace.Trace((*entered, ("run", "engine/drive.c")))
    assert trace.figures() == {"calls": 5, "functions": 4, "files": 3, "changes of file": 3}
    assert trace.listing() == ["  context.c: run x2", "  base/map.c: add, find", "  engine/drive.c: run"]
