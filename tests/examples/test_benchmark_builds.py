"""The benchmark of two builds: a tree beside itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from example_runs import ROOT, start

SCRIPT = str(ROOT / "benchmarks" / "builds.py")


def test_a_tree_beside_itself(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / ".venv").symlink_to(Path(sys.executable).parent.parent)  # whole: a Python finds its packages beside itself
    (tree / "tests").symlink_to(ROOT / "tests")
    (tree / "horo").symlink_to(ROOT / "horo")
    file = tmp_path / "out.json"
    words = [
        "--layouts",
        "2;1,1",
        "--sizes",
        "4,64K",
        "--rounds",
        "2",
        "--turn-ms",
        "5",
        "--models",
        "",
        "--json",
        str(file),
    ]
    done = start([sys.executable, SCRIPT, str(tree), str(tree), *words])
    rows = json.loads(file.read_text())["rows"]
    assert [(row["layout"], row["bytes"]) for row in rows] == [("2", 4), ("2", 65536), ("1,1", 4), ("1,1", 65536)]
    for row in rows:
        assert len(row["before_us"]) == len(row["after_us"]) == 2
        assert all(micros > 0 for micros in row["before_us"] + row["after_us"])
    assert len(done.stdout.splitlines()) == 5


def test_the_training_step_of_a_tree_beside_itself(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / ".venv").symlink_to(Path(sys.executable).parent.parent)
    for name in ("horo", "runner"):
        (tree / name).symlink_to(ROOT / name)
    file = tmp_path / "out.json"
    words = ["--layouts", "", "--rounds", "2", "--models", "mlp-tiny", "--step-turn-ms", "5", "--json", str(file)]
    done = start([sys.executable, SCRIPT, str(tree), str(tree), *words])
    (row,) = json.loads(file.read_text())["rows"]
    assert row["model"] == "mlp-tiny"
    for name in ("before", "after"):
        assert len(row[f"{name}_us"]) == 2
        assert min(*row[f"{name}_us"], row[f"{name}_share"], row[f"{name}_cpu_ms"]) > 0
    assert done.stdout.splitlines()[-1].split()[0] == "mlp-tiny"


@pytest.mark.parametrize("missing", ["before", "after"])
def test_a_tree_that_was_not_built_is_named(tmp_path: Path, missing: str) -> None:
    built = tmp_path / "built"
    (built / ".venv" / "bin").mkdir(parents=True)
    (built / ".venv" / "bin" / "python").symlink_to(sys.executable)
    bare = tmp_path / "bare"
    trees = [bare, built] if missing == "before" else [built, bare]
    done = start([sys.executable, SCRIPT, *map(str, trees)], expected_code=2)
    assert f"{bare} has no .venv" in done.stderr
