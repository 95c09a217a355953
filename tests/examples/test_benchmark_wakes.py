"""The benchmark of wake-ups: a tree beside itself, and a log of strace."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from example_runs import ROOT, start

SCRIPT = str(ROOT / "benchmarks" / "wakes.py")
sys.path.insert(0, str(ROOT / "benchmarks"))
import wakes  # noqa: E402


def test_a_tree_beside_itself(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name, target in (
        (".venv", Path(sys.executable).parent.parent),
        ("tests", ROOT / "tests"),
        ("horo", ROOT / "horo"),
    ):
        (tree / name).symlink_to(target)
    file = tmp_path / "out.json"
    words = ["--rounds", "1", "--calls", "80", "--traced-calls", "0", "--seconds", "0.1", "--json", str(file)]
    start([sys.executable, SCRIPT, str(tree), str(tree), *words])
    rows = json.loads(file.read_text())["rows"]
    assert [row["situation"] for row in rows[::3]] == [situation.name for situation in wakes.SITUATIONS]
    assert all(len(row["before"]) == len(row["after"]) == 1 for row in rows)


def test_calls_in_a_log_of_strace_are_those_between_the_marks_of_their_rank() -> None:
    lines = [
        "10 read(3, 0x1, 8) = 8",
        '10 access("wakes begin", F_OK) = -1 ENOENT (No such file or directory)',
        "10 ppoll([{fd=4}], 1, NULL, NULL, 8 <unfinished ...>",
        "20 read(3, 0x1, 8) = 8",
        "11 write(4, 0x1, 8) = 8",
        "10 <... ppoll resumed>) = 1",
        "10 --- SIGCHLD {si_signo=SIGCHLD} ---",
        '20 access("wakes begin", F_OK) = -1 ENOENT (No such file or directory)',
        '10 access("wakes end", F_OK) = -1 ENOENT (No such file or directory)',
        "20 sendmsg(5, 0x1, 0) = 4",
        "11 write(4, 0x1, 8) = 8",
        "30 write(4, 0x1, 8) = 8",
    ]
    assert wakes.count_calls(lines, [[10, 11], [20]]) == 3
