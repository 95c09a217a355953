"""Jobs in which one rank fails, and others answer to its end in one way or another.

``find_wrong`` looks at hororun's report about one; ``failing_rank.py SEED`` is a rank of it.
"""

from __future__ import annotations

import atexit
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from plain_rank import Rank

from horo.errors import HorovodInternalError

CODES = {"raise": 1, "late": 1, "wrapped": 1, "exit": 7, "vanish": 9, "kill": 137, "fault": 139}
"""How the rank fails, and what hororun exits with then."""
EXCEPTIONS = {
    "raise": "ValueError: bad sample in shard 7",
    "late": "ValueError: bad sample in shard 7",
    "wrapped": "RuntimeError: training failed",
    "exit": "SystemExit: 7",
}
"""What the others are told where an exception ends the rank."""
ANSWERS = ("uncaught", "uncaught", "exit", "wrapped", "slow", "deaf", "leave")
"""What a rank does that gets the error."""


@dataclass(frozen=True)
class Plan:
    """What happens in the job of a seed: after so many steps the culprit fails in a way of ``CODES``.

    The first half of the ranks is on one host, the others on another if ``hosts`` is 2. Each has one of ``ANSWERS``.
    """

    size: int
    hosts: int
    culprit: int
    way: str
    steps: int
    answers: tuple[str, ...]

    @classmethod
    def of(cls, seed: int) -> Plan:
        """The plan of a seed."""
        draw = random.Random(seed)
        size = draw.randint(2, 4)
        answers = tuple(draw.choice(ANSWERS) for _ in range(size))
        return cls(
            size, draw.randint(1, 2), draw.randrange(size), draw.choice(list(CODES)), draw.randint(0, 5), answers
        )

    @property
    def where(self) -> str:
        """For ``-H``."""
        first = self.size - self.size // 2
        return f"one:{first},two:{self.size - first}" if self.hosts == 2 else f"localhost:{self.size}"


def find_wrong(seed: int, remote_shell: str) -> str:
    """What is wrong with hororun's report about the job of a seed; empty: nothing."""
    plan = Plan.of(seed)
    words = ["-np", str(plan.size), "-H", plan.where, "--grace-seconds", "2", "--remote-shell", remote_shell]
    done = subprocess.run(
        [sys.executable, "-m", "horo.runner", *words, __file__, str(seed)],
        env={**os.environ, "HORO_LOG_LEVEL": "off"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    named = re.findall(r"^hororun: rank (\d+) on .*; the job was ended$", done.stderr, re.MULTILINE)
    told = [line for line in done.stdout.splitlines() if f"rank {plan.culprit} (" not in line]
    if plan.way in EXCEPTIONS:
        told = [line for line in done.stdout.splitlines() if EXCEPTIONS[plan.way] not in line]
    if (named, done.returncode, told) == ([str(plan.culprit)], CODES[plan.way], []):
        return ""
    return f"seed {seed}: {plan}: ranks {named}, code {done.returncode}:\n{done.stdout}{done.stderr}"


def fail(way: str) -> None:
    if way == "late":
        atexit.register(time.sleep, 0.5)  # a logger that flushes: the cause ends long after its victims
    if way == "exit":
        sys.exit(7)
    if way == "vanish":
        os._exit(9)
    if way in ("kill", "fault"):
        os.kill(os.getpid(), signal.SIGKILL if way == "kill" else signal.SIGSEGV)
    try:
        raise ValueError("bad sample in shard 7")
    except ValueError as error:
        if way == "wrapped":
            raise RuntimeError("training failed") from error
        raise


def answer(how: str, error: HorovodInternalError) -> None:
    if how == "exit":
        sys.exit(3)
    if how == "wrapped":
        raise RuntimeError("rank 99 may know more") from error
    if how == "slow":
        time.sleep(0.3)
    if how == "deaf":
        time.sleep(60)
    if how != "leave":
        raise error


def main(seed: int) -> None:
    plan = Plan.of(seed)
    if plan.hosts == 2:
        os.environ["HORO_HOST_ID"] = os.environ["HOROVOD_HOSTNAME"]
    rank = Rank()
    number, _ = rank.start()
    atexit.register(rank.close)
    try:
        for step in range(plan.steps):
            rank.allreduce(f"step {step}")
        if number == plan.culprit:
            fail(plan.way)
        rank.allreduce("last")
        rank.allreduce("not reached")
    except HorovodInternalError as error:
        print(f"{type(error).__name__}: {error}")
        answer(plan.answers[number], error)


if __name__ == "__main__":
    main(int(sys.argv[1]))
