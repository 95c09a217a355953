"""Trees of horo, each with an environment of its own, whose builds are looked at."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from pathlib import Path

__all__ = ["add_two_trees", "check_built", "run_in"]


def add_two_trees(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments ``before`` and ``after``."""
    parser.add_argument("before", type=Path, help="a tree after `make build`")
    parser.add_argument("after", type=Path, help="another")


def check_built(parser: argparse.ArgumentParser, *trees: Path) -> None:
    """Ends the program with the parser's error for a tree without an environment."""
    for tree in trees:
        if not (tree / ".venv/bin/python").exists():
            parser.error(f"{tree} has no .venv: run `make build` there")


def run_in(tree: Path, script: Path, *words: str, limit_s: float, before: Sequence[str] = ()) -> str:
    """What a script prints that the tree's interpreter runs.

    Args:
        tree: Also the first word for the script.
        script: Its path.
        words: For the script.
        limit_s: Seconds; it is an error to take more.
        before: Words in front of the command line.

    Raises:
        SystemExit: It has failed; with what it wrote to stderr.
    """
    folder = tree.resolve()
    command = [*before, str(folder / ".venv/bin/python"), str(script), str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{script.name}: {tree} failed with {' '.join(words)}:\n{done.stderr}")
    return done.stdout
