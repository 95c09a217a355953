"""What autotuning makes of a bad start, and of a good one, on two hosts with a slow link.

    python benchmarks/autotune.py                 1 Gbit/s, 4 MiB in 43 tensors per step
    python benchmarks/autotune.py --rate 200mbit --log autotune.csv

The hosts are network namespaces of this machine, as in two_hosts.py: this needs root and iproute2; without them it says
so and ends with code 0. Every job takes steps without computation: all tensors of a small model at once. A step's time
is that of rank 0 by the wall clock; medians are of the last steps of each job, when a search is over.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import report
import spaces
from contest import ContestError, start

RANK = Path(__file__).with_name("autotune_rank.py")
BAD = {"HORO_SEGMENT_BYTES": "4096", "HORO_FUSION_THRESHOLD": "0", "HORO_CYCLE_TIME": "5"}
SEARCH = {"HORO_AUTOTUNE": "1", "HORO_AUTOTUNE_WARMUP_SAMPLES": "1", "HORO_AUTOTUNE_STEPS_PER_SAMPLE": "5"}
JOBS: dict[str, Mapping[str, str]] = {
    "defaults": {},
    "bad start": BAD,
    "tuned from the defaults": SEARCH,
    "tuned from the bad start": SEARCH | BAD,
}
LIMIT_S = 150.0


class Answer(TypedDict):
    """What rank 0 says: times of steps in seconds, how many went before, and what they ran with (empty: untuned)."""

    seconds: list[float]
    before: int
    values: dict[str, int]


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Autotuning between two hosts, from a bad start and a good one.")
    parser.add_argument("--rate", type=spaces.parse_rate, default="1gbit", help="of the link (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="that are measured at the end (default: %(default)s)")
    parser.add_argument("--max-samples", type=int, default=30, help="of the search (default: %(default)s)")
    parser.add_argument("--log", metavar="FILE", help="keep the samples of the search from the bad start, as CSV")
    parser.add_argument("--json", metavar="FILE", help="write all values there")
    arguments = parser.parse_args(words)
    if arguments.steps < 1 or arguments.max_samples < 1:
        parser.error("--steps and --max-samples: at least 1")
    return arguments


def run_job(made: spaces.Spaces, variables: Mapping[str, str], arguments: argparse.Namespace) -> Answer:
    """Runs autotune_rank.py on one rank of each host."""
    launch = [sys.executable, "-m", "horo.runner", "-np", "2", "-H", made.slots(2), "--no-prefix"]
    launch += ["--remote-shell", str(made.remote_shell)]
    for name, value in variables.items():
        launch += ["-x", f"{name}={value}"]
    launch += [sys.executable, str(RANK), str(arguments.steps)]
    try:
        done = subprocess.run(
            [*made.enter(0), *launch], capture_output=True, text=True, check=False, timeout=LIMIT_S, env=os.environ
        )
    except subprocess.TimeoutExpired:
        raise ContestError(f"the job has not ended within {LIMIT_S:.0f} s") from None
    if done.returncode != 0:
        raise ContestError(f"the job ended with code {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    answer: Answer = json.loads(done.stdout)
    return answer


def as_line(name: str, answer: Answer) -> str:
    """One row of the table."""
    seconds = answer["seconds"]
    times = " / ".join(
        report.time_text(value * 1e6) for value in (min(seconds), statistics.median(seconds), max(seconds))
    )
    values = ", ".join(f"{key} {value}" for key, value in answer["values"].items())
    after = f"  after {answer['before']} steps: {values}" if answer["before"] else ""
    return f"  {name:<26} {times:>28}{after}"


def run(arguments: argparse.Namespace) -> int:
    reason = spaces.why_not()
    if reason:
        print(f"autotune.py: skipped: {reason}")
        return 0
    answers: dict[str, Answer] = {}
    print(f"Time of a step between two hosts, {arguments.rate}: min / median / max")
    with spaces.Spaces(2) as made:
        made.limit(arguments.rate)
        for name, variables in JOBS.items():
            searches = {}
            if "HORO_AUTOTUNE" in variables:
                searches = {"HORO_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": str(arguments.max_samples)}
                if arguments.log and variables.items() >= BAD.items():
                    searches["HORO_AUTOTUNE_LOG"] = str(Path(arguments.log).absolute())
            answers[name] = run_job(made, {**variables, **searches}, arguments)
            print(as_line(name, answers[name]), flush=True)
    rows = [{"job": name, **answer} for name, answer in answers.items()]
    report.save(arguments, "autotune", rows)
    return 0


if __name__ == "__main__":
    start(parse_arguments, run)
