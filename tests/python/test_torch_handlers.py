"""Signal handlers that call horo while the program is in a call of horo."""

from __future__ import annotations

import subprocess
import sys

import pytest
from jobs import as_users_start

INTERRUPTED = """
import atexit, signal
import torch
import horo.torch as hvd
from horo.core import stack_dump, context
from horo.bootstrap import job
from horo._native import ffi
from horo.torch.engine import request_cache, runtime as _runtime

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
    "init": ("hvd.shutdown(); assert not hvd.is_initialized()", "job.connect = lambda *_: interrupt(); hvd.init()"),
    "the end of shutdown": (
        "hvd.shutdown(); assert runtime.core._context == ffi.NULL",
        "hvd.init(); runtime, stop = _runtime.current(), stack_dump.Answers.stop\n"
        "stack_dump.Answers.stop = lambda self: (interrupt(), stop(self))\n"
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


def run(handler: str, program: str, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    command = [sys.executable, "-c", INTERRUPTED.format(handler=handler, program=program)]
    done = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("place", INTERRUPTIONS)
def test_a_signal_handler_may_do_what_it_has_interrupted(place: str) -> None:
    assert run(*INTERRUPTIONS[place]) == (1, "", "left\n")


def test_a_shutdown_that_a_handler_has_ended_by_an_exception_is_done_at_exit() -> None:
    program = """
atexit.register(lambda: print(runtime.core._context == ffi.NULL))  # behind all that is registered later
hvd.init()
runtime, stop = _runtime.current(), stack_dump.Answers.stop
stack_dump.Answers.stop = lambda self: (interrupt(), stop(self))
hvd.shutdown()
"""
    assert run("pass", program, as_users_start()) == (1, "True\n", "left\n")


def test_a_shutdown_goes_on_behind_a_handler_that_has_done_it() -> None:
    program = """
class Forked:
    def __get__(self, runtime, kind):
        calls.append(0)
        if len(calls) == 2:
            interrupt()
        return False

calls = []
hvd.init()
_runtime.Runtime.forked = Forked()
hvd.shutdown()
assert not signals and not hvd.is_initialized()
"""
    assert run("hvd.shutdown(); return", program) == (0, "", "")


@pytest.mark.parametrize(
    ("interrupted", "program"),
    [
        ("init()", "connect = job.connect; job.connect = lambda *args: (interrupt(), connect(*args))[1]; hvd.init()"),
        (
            "shutdown()",
            "hvd.init(); stop = stack_dump.Answers.stop\n"
            "stack_dump.Answers.stop = lambda self: (stop(self), interrupt())\n"
            "hvd.shutdown()",
        ),
    ],
    ids=["init", "the end of shutdown"],
)
def test_an_init_within_another_call_for_the_beginning_or_end_is_refused(interrupted: str, program: str) -> None:
    """What it has interrupted goes on, and so does the process."""
    handler = """
    try:
        hvd.init()
    except hvd.UsageError as error:
        print(error)
    return
"""
    program += f"""
assert not signals and hvd.is_initialized() == ({interrupted!r} == "init()")
hvd.init()
assert hvd.allreduce(torch.ones(1)).item() == 1
hvd.shutdown()
"""
    told = f"init() was called while {interrupted} was at work, by a signal handler perhaps: call it behind that\n"
    assert run(handler, program) == (0, told, "")


def test_an_init_within_one_that_is_done_does_nothing() -> None:
    program = """
from horo.torch import lifecycle
lifecycle.register_all = lambda *_: interrupt()
hvd.init(process_sets=[[0]])
assert not signals and hvd.is_initialized()
"""
    assert run("hvd.init(); return", program) == (0, "", "")
