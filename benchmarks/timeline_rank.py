"""One rank of timeline.py: trains, by turns with a timeline, or the counters of ``hvd.stats()``, and without."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import models
import torch
from devices import CPU
from libraries.horo import Opened
from workloads.training_step import Training

import horo.torch as hvd
from horo.torch.engine import runtime

WARM_STEPS = 3


class Turns:
    """A model in training whose steps are timed."""

    def __init__(self, model: str, folder: str) -> None:
        library: Any = Opened(int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"]), lambda value: [value])
        self.training = Training(library, models.RECIPES[model], CPU)
        self.path = f"{folder}/{{rank}}.json"

    def slowest(self, seconds: float) -> float:
        """Of all ranks."""
        return float(hvd.allreduce(torch.tensor([seconds], dtype=torch.float64), op=hvd.Max, name="slowest")[0])

    def time(self, steps: int) -> float:
        """Seconds of a step."""
        hvd.barrier()
        begin_s = time.perf_counter()
        for _ in range(steps):
            self.training.step()
        return self.slowest((time.perf_counter() - begin_s) / steps)

    def time_plain(self, steps: int) -> float:
        """The same without the counters of ``hvd.stats()``."""
        meter: Any = runtime.current().course.meter
        meter.end_step = lambda _: None
        self.training.step()  # as before the other turn
        seconds = self.time(steps)
        del meter.end_step
        return seconds

    def time_traced(self, steps: int) -> tuple[float, int]:
        """The same with a timeline on each rank, and how many events that has got."""
        hvd.start_timeline(self.path, mark_cycles=True)
        self.training.step()  # the first one names the rows
        seconds = self.time(steps)
        hvd.stop_timeline()
        return seconds, len(json.loads(Path(self.path.format(rank=hvd.rank())).read_text()))


def main() -> int:
    of, model, rounds, turn_ms = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    torch.set_flush_denormal(True)
    with tempfile.TemporaryDirectory(prefix="timeline-") as folder:
        turns = Turns(model, folder)
        turns.time(WARM_STEPS)
        steps = max(2, round(turn_ms / 1e3 / turns.time(WARM_STEPS)))
        found: dict[str, list[float]] = {"off_us": [], "on_us": []}
        events = 0
        for number in range(rounds):
            for is_on in (False, True) if number % 2 == 0 else (True, False):
                if of == "stats" and not is_on:
                    seconds = turns.time_plain(steps)
                elif of == "timeline" and is_on:
                    seconds, events = turns.time_traced(steps)
                else:
                    turns.training.step()  # as before the other turn
                    seconds = turns.time(steps)
                found["on_us" if is_on else "off_us"].append(seconds * 1e6)
        if hvd.rank() == 0:
            print(json.dumps({**found, "steps": steps, "events_per_step": events / (steps + 1)}), flush=True)
        hvd.barrier()
        hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
