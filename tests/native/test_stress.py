"""Random schedules over the whole core, checked by arithmetic: fixed seeds, and a fresh one each time."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import stress_build
from native_build import FLAVOUR
from skips import no_compiler

OPERATIONS = {"": 1500, "address": 300, "thread": 200}[FLAVOUR]
SCHEDULES = {"": 4, "address": 2, "thread": 2}[FLAVOUR]
"""Each of the tests below takes a few seconds."""

pytestmark = pytest.mark.timeout(300)  # the program is built by the first

DEADLINE_S = {"": 120, "address": 150, "thread": 150}[FLAVOUR]
"""Of a whole run, which takes seconds; where other programs have the cores, each wait takes their turns, too."""


@pytest.fixture(scope="module")
def program() -> Path:
    if reason := no_compiler():
        pytest.skip(reason)
    return stress_build.build()


def run(program: Path, *options: str) -> None:
    command = [str(program), "--operations", str(OPERATIONS), "--deadline", str(DEADLINE_S), *options]
    done = subprocess.run(
        command,
        env=stress_build.environment(os.environ),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S + 30,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[:5000]}"


@pytest.mark.parametrize("seed", range(0, 8 * SCHEDULES, SCHEDULES))
def test_ranks_get_what_arithmetic_says_whatever_happens(program: Path, seed: int) -> None:
    run(program, "--seed", str(seed), "--schedules", str(SCHEDULES))


@pytest.mark.parametrize("seed", [1000, 2000])
def test_one_host_gets_what_arithmetic_says(program: Path, seed: int) -> None:
    run(program, "--seed", str(seed), "--schedules", str(SCHEDULES), "--hosts", "1", "--together")


def test_a_fresh_schedule_holds_too(program: Path) -> None:
    run(program, "--schedules", str(SCHEDULES))


@pytest.mark.parametrize(
    "wrong", [["--sed", "1"], ["--seed"], ["--hosts", "9"], ["--teams", "9"], ["--operations", "0"]]
)
def test_a_wrong_option_is_named(program: Path, wrong: list[str]) -> None:
    done = subprocess.run([program, *wrong], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert wrong[0] in done.stderr
