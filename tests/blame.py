"""Counts wrong roots among random failures: ``python tests/blame.py [--jobs 1000] [--seed 0] [--at-once 2]``.

Each job has one rank that fails (``failing_rank.Plan``), and others that answer to its end in one way or another.
hororun must name that rank and exit with its code, and the others must be told the exception. Prints what differs; the
exit code is 1 if anything does.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from failing_rank import CODES, EXCEPTIONS, Plan
from jobs import make_remote_shell

__all__ = ["find_wrong"]

_JOB_S = 60


def find_wrong(seed: int, remote_shell: str) -> str:
    """What is wrong with hororun's report about the job of a seed; empty: nothing."""
    plan = Plan.of(seed)
    words = ["-np", str(plan.size), "-H", plan.where, "--grace-seconds", "2", "--remote-shell", remote_shell]
    script = str(Path(__file__).with_name("failing_rank.py"))
    done = subprocess.run(
        [sys.executable, "-m", "horo.runner", *words, script, str(seed)],
        env={**os.environ, "HORO_LOG_LEVEL": "off"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=_JOB_S,
    )
    named = re.findall(r"^hororun: rank (\d+) on .*; the job was ended$", done.stderr, re.MULTILINE)
    told = [line for line in done.stdout.splitlines() if f"rank {plan.culprit} (" not in line]
    if plan.way in EXCEPTIONS:
        told = [line for line in done.stdout.splitlines() if EXCEPTIONS[plan.way] not in line]
    if (named, done.returncode, told) == ([str(plan.culprit)], CODES[plan.way], []):
        return ""
    return f"seed {seed}: {plan}: ranks {named}, code {done.returncode}:\n{done.stdout}{done.stderr}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first job; the others follow")
    parser.add_argument("--at-once", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.at_once) as pool:
        shell = make_remote_shell(Path(folder))
        seeds = range(given.seed, given.seed + given.jobs)
        wrong = [finding for finding in pool.map(lambda seed: find_wrong(seed, shell), seeds) if finding]
    print(*wrong, f"{len(wrong)} wrong roots in {given.jobs} failures", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
