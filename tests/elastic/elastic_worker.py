"""A worker of an elastic job: counts steps, and shares what it has counted with newcomers.

Arguments: the number of steps, and ``WORKER:STEP:WHAT`` for each worker that is to do something before a step: ``kill``
itself, ``hang``, ``leave`` a child behind and kill itself, ``raise``, or ``exit``. ``WORKER:init:kill``: before
``init()``. ``WORKER:made:raise``: after it. ``WORKER:done:kill``: after training. Training ends before where there is
a file of the name in STOP_FILE. Workers leave for others after a multiple of LEAVE_EVERY steps.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import horo.torch as hvd
from horo.bootstrap.elastic import membership
from horo.errors import GroupError, MismatchError, NotInitializedError, UsageError

STEPS = int(sys.argv[1])
DEEDS = {(int(worker), step): what for worker, step, what in (word.split(":") for word in sys.argv[2:])}
LEAVE_EVERY = int(os.environ.get("LEAVE_EVERY", "1"))
STOP = Path(os.environ.get("STOP_FILE", "/"))
member = membership()
assert member is not None


def do(step: str) -> None:
    """Does what is asked of this worker at a step."""
    what = DEEDS.get((member.worker, step))
    if what == "leave":
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print(f"child {child.pid}", flush=True)
    if what in ("kill", "leave"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "hang":
        time.sleep(1000)
    elif what == "exit":
        sys.exit(3)
    elif what == "raise":
        raise ValueError("a mistake")


do("init")
hvd.init()
if member.is_newcomer:
    assert "horo.bootstrap.job" in sys.modules  # others do not wait until it is imported
    print(f"forecast {member.worker} {hvd.rank()} {hvd.size()}", flush=True)
    try:
        hvd.allreduce(torch.ones(1))
    except UsageError as error:
        print(f"refused: {error}", flush=True)
do("made")
count = torch.zeros(1, dtype=torch.int64)


def train() -> bool:
    """Steps until all are done (True), or workers are to join."""
    counts = hvd.allgather(count, name="counts")
    count.copy_(hvd.broadcast(count, int(counts.argmax()), name="sync"))
    member.committed(int(count))
    print(f"worker {member.worker} is {hvd.rank()} of {hvd.size()} at {int(count)}", flush=True)
    while int(count) < STEPS:
        do(str(int(count)))
        count.add_(hvd.allreduce(torch.ones(1, dtype=torch.int64), op=hvd.Max, name="step"))
        member.committed(int(count))
        time.sleep(0.02)
        seen = torch.tensor([1 if member.change() else 0, 1 if STOP.is_file() else 0])
        is_changed, is_over = hvd.allreduce(seen, op=hvd.Max, name="seen").tolist()
        if (is_changed and int(count) % LEAVE_EVERY == 0) or is_over:
            return bool(is_over)
    return True


while True:
    try:
        member.join()
        if train():
            member.done()
            do("done")
            break
        member.leave(None)
    except (MismatchError, NotInitializedError):
        raise
    except GroupError as error:
        print(f"error {member.worker} {type(error).__name__}", flush=True)
        member.leave(error)
print(f"end {member.worker} {int(count)}", flush=True)
