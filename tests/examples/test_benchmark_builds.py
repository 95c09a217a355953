"""The benchmarks of two builds: a tree beside itself; and what reads traces of calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from example_runs import ROOT, start, whole

sys.path.insert(0, str(ROOT / "benchmarks"))
import call_trace  # (benchmarks/call_trace.py)
import wakes  # (benchmarks/wakes.py)

SCRIPT = str(ROOT / "benchmarks" / "builds.py")


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
def test_a_tree_beside_itself(tree: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["--layouts", "2;1,1", "--sizes", "4,64K", "--rounds", "2", "--turn-ms", "5", "--models", "", "--json"]
    done = start([sys.executable, SCRIPT, str(tree), str(tree), *words, str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [(row["layout"], row["bytes"]) for row in rows] == [("2", 4), ("2", 65536), ("1,1", 4), ("1,1", 65536)]
    for row in rows:
        assert len(row["before_us"]) == len(row["after_us"]) == 2
        assert all(micros > 0 for micros in row["before_us"] + row["after_us"])
    assert len(done.stdout.splitlines()) == 5


@whole
def test_the_training_step_of_a_tree_beside_itself(tree: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["--layouts", "", "--rounds", "2", "--models", "mlp-tiny", "--step-turn-ms", "5", "--json", str(file)]
    done = start([sys.executable, SCRIPT, str(tree), str(tree), *words])
    (row,) = json.loads(file.read_text())["rows"]
    assert row["model"] == "mlp-tiny"
    for name in ("before", "after"):
        assert len(row[f"{name}_us"]) == 2
        assert min(*row[f"{name}_us"], row[f"{name}_share"], row[f"{name}_cpu_ms"]) > 0
    assert done.stdout.splitlines()[-1].split()[0] == "mlp-tiny"


@whole
def test_wake_ups_of_a_tree_beside_itself(tree: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["--rounds", "1", "--calls", "80", "--traced-calls", "0", "--seconds", "0.1", "--json", str(file)]
    start([sys.executable, str(ROOT / "benchmarks" / "wakes.py"), str(tree), str(tree), *words])
    rows = json.loads(file.read_text())["rows"]
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
