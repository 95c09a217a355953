"""Signal handlers that call horo while the program is in a call of horo."""

from __future__ import annotations

import subprocess
import sys

import pytest

INTERRUPTED = """
import signal
import torch
import horo.torch as hvd
from horo._bootstrap import job
from horo.torch import _request_cache, _runtime

signals = [signal.SIGUSR1]

def interrupt():
    if signals:
        signal.raise_signal(signals.pop())

def handler(*_):
    {handler}
    raise SystemExit("left")

signal.signal(signal.SIGUSR1, handler)
{program}
"""

INTERRUPTIONS = {
    "init": (
        "hvd.shutdown(); assert not hvd.is_initialized()",
        "job.connect = lambda *_: interrupt(); hvd.init()",
    ),
    "shutdown": (
        "hvd.shutdown(); assert not hvd.is_initialized()",
        "hvd.init(); close = job.RunningRank.close\n"
        "job.RunningRank.close = lambda self: (interrupt(), close(self))\n"
        "hvd.shutdown()",
    ),
    "operation": (
        "assert hvd.allreduce(torch.ones(1), name='in the handler').item() == 1",
        "hvd.init()\n"
        "class Kept(dict):\n"
        "    def setdefault(self, key, value): self.setdefault = super().setdefault; interrupt()\n"
        "_runtime.current().request_cache._kept = Kept()\n"
        "hvd.allreduce(torch.ones(1), name='x')",
    ),
}


@pytest.mark.parametrize("place", INTERRUPTIONS)
def test_a_signal_handler_may_do_what_it_has_interrupted(place: str) -> None:
    handler, program = INTERRUPTIONS[place]
    code = INTERRUPTED.format(handler=handler, program=program)
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "left\n")
