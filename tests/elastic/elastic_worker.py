"""A worker of an elastic job, without torch: counts steps, and shares what it has counted with newcomers.

Arguments: the number of steps, and ``WORKER:STEP:WHAT`` for each worker that is to do something before a step: ``kill``
itself, ``hang``, ``leave`` a child behind and kill itself, ``raise``, or ``exit``. ``WORKER:init:kill``: before
``init()``. ``WORKER:made:raise``: after it. ``WORKER:done:kill``: after training. Training ends before where there is
a file of the name in STOP_FILE. Workers leave for others after a multiple of LEAVE_EVERY steps.
"""

from __future__ import annotations

import array
import atexit
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from horo.bootstrap import job as bootstrap
from horo.bootstrap.elastic import membership
from horo.bootstrap.running_rank import RunningRank
from horo.core.context import DTYPES, OPS, REDUCE_OPS, RequestBuffer, Tensor
from horo.errors import GroupError, MismatchError, NotInitializedError

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


jobs: list[RunningRank] = []


def begin() -> None:
    """``init()`` in a generation."""
    jobs.append(bootstrap.start(threads=1))


def end() -> None:
    """``shutdown()``."""
    for job in jobs:
        job.close()
    jobs.clear()


def highest(name: str, *own: int) -> list[int]:
    """The highest that any rank has, of each number."""
    values = array.array("q", own)
    tensor = Tensor(values.buffer_info()[0], values.buffer_info()[0], (len(own),), DTYPES["int64"])
    request = RequestBuffer.of(OPS["allreduce"], name, [tensor], reduce_op=REDUCE_OPS["max"])
    jobs[0].context.finish(jobs[0].context.submit(request))
    return values.tolist()


do("init")
atexit.register(end)
member.begin_with(begin, end)
if not member.is_newcomer:
    member.join()
do("made")
count = [0]


def train() -> bool:
    """Steps until all are done (True), or workers are to join."""
    count[:] = highest("sync", *count)
    member.committed(count[0])
    print(f"worker {member.worker} is {jobs[0].rank} of {jobs[0].size} at {count[0]}", flush=True)
    while count[0] < STEPS:
        do(str(count[0]))
        count[0] += highest("step", 1)[0]
        member.committed(count[0])
        time.sleep(0.02)
        is_changed, is_over = highest("seen", bool(member.change()), STOP.is_file())
        if (is_changed and count[0] % LEAVE_EVERY == 0) or is_over:
            return bool(is_over)
    return True


while True:
    try:
        member.join()
        if train():
            member.done()
            end()  # it returns once the others have the last step, too
            do("done")
            break
        member.leave(None)
    except (MismatchError, NotInitializedError):
        raise
    except GroupError as error:
        print(f"error {member.worker} {type(error).__name__}", flush=True)
        member.leave(error)
print(f"end {member.worker} {count[0]}", flush=True)
