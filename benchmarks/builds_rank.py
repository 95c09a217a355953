"""All ranks of one turn of builds.py, by fork: started by the interpreter of the tree whose core is measured.

    TREE/.venv/bin/python benchmarks/builds_rank.py TREE 1,1 4,65536 0.1

Prints one JSON object: microseconds of a float32 allreduce by size, on rank 0, the median of five stretches.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import forks
import numpy as np

TREE = Path(sys.argv[1])
sys.path[:0] = [str(TREE / "tests"), str(TREE)]  # before what is installed: the tree's own core is what is measured
from fabric import close_setup, make_setups  # noqa: E402  (tests/fabric.py of the tree)

_core: Any = importlib.import_module("horo.core.context" if (TREE / "horo/core").is_dir() else "horo._core")
DTYPES, OPS, REDUCE_OPS = _core.DTYPES, _core.OPS, _core.REDUCE_OPS

STRETCHES = 5
WARM_SHARE = 4


def measure(hosts: list[int], sizes: list[int], turn_s: float) -> dict[int, float]:
    setups = make_setups(hosts, tcp=True, segment_bytes=forks.segment_bytes(hosts), spin_us=1000)
    rank = forks.fork_ranks(setups, close_setup)
    context = _core.Context(setups[rank])
    found = {}
    for size in sizes:
        data = np.zeros(max(1, size // 4), np.float32)
        clock = np.zeros(1, np.float64)

        def request(name: str, array: np.ndarray) -> Any:
            kind = DTYPES[str(array.dtype)]
            tensor = _core.Tensor(array.ctypes.data, array.ctypes.data, array.shape, kind)
            return _core.RequestBuffer.of(OPS["allreduce"], name, [tensor], reduce_op=REDUCE_OPS["max"], sync=True)

        call, agree = request(f"data {size}", data), request(f"clock {size}", clock)
        calls = 1
        while True:  # as many calls as take a stretch; all ranks must make the same, so they agree on the time
            begin = time.perf_counter()
            for _ in range(calls):
                context.run(call)
            clock[0] = time.perf_counter() - begin
            context.run(agree)
            if clock[0] >= turn_s / STRETCHES / WARM_SHARE:
                break
            calls *= 2
        calls = max(1, round(calls * turn_s / STRETCHES / float(clock[0])))
        times = []
        for _ in range(STRETCHES):
            begin = time.perf_counter()
            for _ in range(calls):
                context.run(call)
            times.append((time.perf_counter() - begin) / calls)
        found[size] = sorted(times)[STRETCHES // 2] * 1e6
    context.destroy()
    forks.end_ranks(rank, len(setups))
    return found


if __name__ == "__main__":
    layout, sizes, turn_s = sys.argv[2:]
    found = measure([int(n) for n in layout.split(",")], [int(n) for n in sizes.split(",")], float(turn_s))
    print(json.dumps(found))
