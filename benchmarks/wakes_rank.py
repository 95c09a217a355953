"""All ranks of one turn of wakes.py, by fork: started by the interpreter of the tree whose core is looked at.

    TREE/.venv/bin/python benchmarks/wakes_rank.py TREE 1,1 sync 1000

Prints one JSON object: what the kernel has counted for all ranks while they made so many calls, or, of ``idle``, while
so many milliseconds passed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import numpy as np
from resting import Activity, activity_of

TREE = Path(sys.argv[1])
sys.path[:0] = [str(TREE / "tests"), str(TREE)]  # before what is installed: the tree's own core is what is looked at
from fabric import close_setup, make_setups  # noqa: E402  (tests/fabric.py of the tree)

_core = forks.core_of(TREE)
DTYPES, OPS, REDUCE_OPS = _core.DTYPES, _core.OPS, _core.REDUCE_OPS

WARM_CALLS = 200
ASYNC_NAMES = 8
SETTLE_S = 0.2
BEGIN, END = "wakes begin", "wakes end"
"""Names of no files, which a rank asks for around what is counted, so that strace shows it."""


def own_activity() -> dict[str, int]:
    """Of the thread that calls, and of all others of this process."""
    caller = _of_thread(threading.get_native_id())
    whole = activity_of([os.getpid()])
    return {
        "caller": caller.wake_ups,
        "others": whole.wake_ups - caller.wake_ups,
        "forced": whole.forced,
    }


def _of_thread(number: int) -> Activity:
    return activity_of([os.getpid()], threads={number})


def make_calls(context: Any, kind: str) -> Callable[[int], None]:
    """What makes so many calls of this kind; all ranks make the same."""
    data = np.ones((ASYNC_NAMES, 1), np.float32)

    def request(index: int) -> Any:
        address = data[index].ctypes.data
        tensor = _core.Tensor(address, address, (1,), DTYPES["float32"])
        return _core.RequestBuffer.of(
            OPS["allreduce"], f"data {index}", [tensor], reduce_op=REDUCE_OPS["max"], sync=kind != "async"
        )

    requests = [request(index) for index in range(ASYNC_NAMES)]

    def sync(calls: int) -> None:
        for _ in range(calls):
            context.run(requests[0])

    def asynchronous(calls: int) -> None:
        for _ in range(calls // ASYNC_NAMES):
            for handle in [context.submit(each) for each in requests]:
                context.finish(handle)

    return asynchronous if kind == "async" else sync


def measure(hosts: list[int], kind: str, amount: int) -> dict[str, Any]:
    """The sums over ranks, and the numbers of the threads of each, on rank 0."""
    setups = make_setups(hosts, tcp=True, segment_bytes=forks.segment_bytes(hosts), spin_us=1000)
    answers, tell = os.pipe()
    rank = forks.fork_ranks(setups, close_setup)
    context = _core.Context(setups[rank])
    call = make_calls(context, kind)
    call(WARM_CALLS)
    if kind == "idle":
        time.sleep(SETTLE_S)
    before = own_activity()
    os.access(BEGIN, os.F_OK)
    if kind == "idle":
        time.sleep(amount / 1000)
    else:
        call(amount)
    os.access(END, os.F_OK)
    after = own_activity()
    after["caller"] -= kind == "idle"  # from its own sleep
    threads = [int(entry.name) for entry in Path("/proc/self/task").iterdir()]
    counts = {name: after[name] - before[name] for name in after}
    os.write(tell, json.dumps({"counts": counts, "threads": threads}).encode() + b"\n")
    context.destroy()
    forks.end_ranks(rank, len(setups))
    os.close(tell)
    with os.fdopen(answers) as lines:
        found = [json.loads(line) for line in lines]
    counts = {name: sum(each["counts"][name] for each in found) for name in before}
    return {"counts": counts, "threads": [each["threads"] for each in found]}


if __name__ == "__main__":
    layout, kind, amount = sys.argv[2:]
    print(json.dumps(measure([int(n) for n in layout.split(",")], kind, int(amount))))
