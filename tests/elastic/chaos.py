"""Random faults in an elastic job of real processes: it goes on, ends well, and leaves nothing behind.

    python tests/elastic/chaos.py --faults 1000 --seconds 1500 --seed 7

Ranks and newcomers are killed, ended by SIGTERM or an exception, or stopped for a while, also for longer than the
others wait. A fault that ends a process leaves two others at work, so the job has to end with code 0.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from jobs import TORCH_S, Hororun, Launched, wait_until

WORKER = str(Path(__file__).with_name("chaos_worker.py"))
SIZE, SLOTS = 4, 64
LIMITS = {"HORO_STALL_CHECK_TIME_SECONDS": "2", "HORO_STALL_SHUTDOWN_TIME_SECONDS": "6"}
PATIENCE_S = 6 * TORCH_S
ENDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1)
STOPS_S = (0.01, 0.3, 2.0, 9.0)


class Chaos:
    """One job.

    Args:
        folder: Of its files.
        choose: The faults.
        hororun: Starts it.
    """

    def __init__(self, folder: Path, choose: random.Random, hororun: Hororun) -> None:
        self.folder, self.choose = folder, choose
        self.faults: Counter[str] = Counter()
        self._seen: dict[int, tuple[str, float]] = {}
        self._errors = (folder / "stderr").open("w+b")
        words = ("-np", str(SIZE), "--min-np", "1", WORKER, str(folder), choose.choice(("", "optimizer")))
        options = {"stderr": self._errors, "environment": LIMITS}
        self.job: Launched = hororun.start(*words, where=f"localhost:{SLOTS}", **options)

    def workers(self) -> list[int]:
        return self.job.processes(f"{sys.executable} {WORKER}")

    def at_work(self) -> list[int]:
        """The workers that have finished a step within the last second."""
        found = []
        for pid in self.workers():
            with contextlib.suppress(OSError):
                steps, now_s = (self.folder / f"steps.{pid}").read_text(), time.monotonic()
                if pid not in self._seen or self._seen[pid][0] != steps:  # empty while it is written
                    self._seen[pid] = (steps, now_s)
                if now_s - self._seen[pid][1] < 1:
                    found.append(pid)
        return found

    def wait_for(self, true: Callable[[], object], what: str) -> None:
        assert self.job.process.poll() is None, self.errors()
        try:
            wait_until(lambda: true() or self.job.process.poll() is not None, what, deadline_s=PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{dict(self.faults)}\n{self.errors()}") from None
        assert self.job.process.poll() is None, self.errors()

    def fault(self) -> None:
        """One fault; a stopped process goes on after it."""
        self.wait_for(lambda: len(self.at_work()) >= 3, "three workers train")
        victim = self.choose.choice(sorted(self.workers()))
        with contextlib.suppress(ProcessLookupError):
            if self.choose.random() < 0.6:
                number = self.choose.choice(ENDS)
                self.faults[number.name] += 1
                os.kill(victim, number)
                return
            stopped_s = self.choose.choice(STOPS_S)
            self.faults[f"stopped for {stopped_s} s"] += 1
            os.kill(victim, signal.SIGSTOP)
            end_s = time.monotonic() + stopped_s
            wait_until(lambda: time.monotonic() > end_s, "the end of the stop")
            os.kill(victim, signal.SIGCONT)

    def end(self) -> None:
        """Ends the job, and checks what it has done and left."""
        self.wait_for(lambda: len(self.at_work()) >= 2, "two workers train")
        open_now = len(list(Path(f"/proc/{self.job.process.pid}/fd").iterdir()))
        started = self.errors().count(" starts") + SIZE
        assert open_now < 60 + 4 * SIZE + min(started, SLOTS), f"{open_now} descriptors after {started} workers"
        (self.folder / "stop").touch()
        out, _ = self.job.process.communicate(timeout=PATIENCE_S)
        assert self.job.process.returncode == 0, self.errors()
        steps = re.findall(r"end (\d+)", out.decode())
        assert steps and len(set(steps)) == 1, (steps, self.errors())
        self.job.nothing_is_left()

    def errors(self) -> str:
        self._errors.flush()
        return (self.folder / "stderr").read_text(errors="replace")

    def close(self) -> None:
        self._errors.close()


def shared_kib() -> int:
    """The memory of memfds and of ``/dev/shm`` on this machine."""
    return int(next(re.findall(r"\d+", line)[0] for line in Path("/proc/meminfo").open() if line.startswith("Shmem:")))


def run(faults: int, seconds: float, seed: int, per_job: int = 40) -> Counter[str]:
    """Jobs one after the other, until there were so many faults or the time is over; the faults of each kind."""
    hororun, done, end_s = Hororun(), Counter[str](), time.monotonic() + seconds
    choose = random.Random(seed)
    try:
        while done.total() < faults and time.monotonic() < end_s:
            with (
                tempfile.TemporaryDirectory() as folder,
                contextlib.closing(Chaos(Path(folder), choose, hororun)) as job,
            ):
                while job.faults.total() < min(per_job, faults - done.total()) and time.monotonic() < end_s:
                    job.fault()
                job.end()
                done += job.faults
                print(f"seed {seed}: {done.total()} faults, {dict(done)}, shared memory {shared_kib()} KiB", flush=True)
    finally:
        hororun.clean_up()
    left = [path.name for path in Path("/dev/shm").iterdir() if "horo" in path.name]
    assert not left, left
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description="Random faults in elastic jobs.")
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    run(given.faults, given.seconds, given.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
