"""How fast a core reads what another core has just written: the state of the machine that decides over shared memory.

Two processes, one page of counters and two areas of 4 MiB in memory that both map. On virtual machines the result
changes within seconds by a factor of ten, with the place that the host gives to virtual cores.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import Any

import numpy as np
from contestant import Work
from libraries import Library

AREA_BYTES = 4 << 20
PAGE_BYTES = 4096
MEMORY_BYTES = PAGE_BYTES + 2 * AREA_BYTES
WAIT_LIMIT_S = 10
LOOKS_BEFORE_YIELD = 1000


class Probe:
    def __init__(self, rank: int, descriptor: int) -> None:
        memory = np.frombuffer(mmap.mmap(descriptor, MEMORY_BYTES), dtype=np.int64)
        areas = memory[PAGE_BYTES // 8 :].reshape(2, -1)
        self._mine, self._other = areas[rank], areas[1 - rank]
        # A memoryview hands out plain numbers, several times faster than an array.
        counters = memory[: PAGE_BYTES // 8].data
        self._my_counter, self._other_counter = counters[64 * rank :], counters[64 * (1 - rank) :]
        self._private = np.zeros(AREA_BYTES // 8, dtype=np.int64)
        self._meetings = 0
        self._value = 0
        self._read_us: list[float] = []

    def _meet(self) -> None:
        """Returns, without having slept, when the other process is here too."""
        self._meetings += 1
        self._my_counter[0] = self._meetings
        deadline = time.monotonic() + WAIT_LIMIT_S
        looks = 0
        while self._other_counter[0] < self._meetings:
            looks += 1
            if looks % LOOKS_BEFORE_YIELD == 0:
                os.sched_yield()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the other process of the probe has not come within {WAIT_LIMIT_S} s")

    def call(self) -> None:
        self._value += 1
        self._mine.fill(self._value)
        self._meet()
        begin = time.perf_counter_ns()
        np.copyto(self._private, self._other)
        self._read_us.append((time.perf_counter_ns() - begin) / 1e3)
        self._meet()

    def check(self) -> str:
        self.call()
        right = bool((self._private == self._value).all())
        return "" if right else "it read memory that the other process had not written"

    def figures(self) -> dict[str, float]:
        fastest = min(self._read_us)  # whatever disturbs makes it slower
        self._read_us.clear()
        return {"read_us": fastest}


def prepare(library: Library, parameters: dict[str, Any]) -> Work:
    probe = Probe(library.rank, parameters["descriptor"])
    return Work(probe.call, probe.check, probe.figures)
