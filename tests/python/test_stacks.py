"""Stacks of threads, at which a report looks; and signal handlers that call horo in the midst of a call of horo."""

import contextlib
import gc
import io
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import as_users_start, run_python
from rank_pool import RankPool

import horo
from horo.diagnostics import deadlock
from horo.diagnostics.deadlock import OwnThread, describe_stacks, innermost_own
from horo.diagnostics.frames import current_frames

INSIDE = str(Path(horo.__file__).with_name("_somewhere.py"))


def functions_of_a_thread(code: str, run: Callable[[dict[str, Any]], None]) -> list[str]:
    """The functions in which a thread is said to stand, the innermost last, while ``end.wait()`` blocks in it."""
    begun, end = threading.Event(), threading.Event()
    names: dict[str, Any] = {"begun": begun, "end": end}
    exec(compile(code, INSIDE, "exec"), names)
    thread = threading.Thread(target=run, args=(names,), name="trainer")
    thread.start()
    try:
        assert begun.wait(60)
        said = describe_stacks([thread.ident or 0]).partition("thread 'trainer':")[2]
    finally:
        end.set()
        thread.join()
    return [line.rpartition(" in ")[2] for line in said.splitlines() if line.startswith('  File "')]


@pytest.mark.parametrize("folder", [".local/lib/python3.11/site-packages", "python3/dist-packages"])
def test_a_library_outside_of_the_interpreters_folders_is_no_code_of_the_user(folder: str) -> None:
    assert innermost_own(["/own/train.py", f"/own/{folder}/torch/autograd/graph.py"]) == 0


def test_calls_inside_horo_are_left_out_at_the_end_but_not_those_of_the_program() -> None:
    def train(module: dict[str, Any]) -> None:
        module["allreduce"]()

    code = "def allreduce():\n    run()\ndef run():\n    begun.set()\n    end.wait(60)\n"
    assert functions_of_a_thread(code, train)[-1] == "train"

    def train(module: dict[str, Any]) -> None:
        def compress() -> None:
            module["begun"].set()
            module["end"].wait(60)

        module["step"](compress)

    found = functions_of_a_thread("def step(call):\n    call()\n", train)
    assert found[found.index("train") :][:3] == ["train", "step", "compress"]


@pytest.mark.parametrize(("kind", "others"), [(threading.Thread, "thread 'busy'"), (OwnThread, "")])
def test_a_log_handler_in_a_thread_of_horo_is_no_thread_that_may_submit(
    monkeypatch: pytest.MonkeyPatch, kind: type[threading.Thread], others: str
) -> None:
    begun, end = threading.Event(), threading.Event()

    def handle() -> None:
        begun.set()
        while not end.is_set():  # it computes, in a file that is no library's
            pass

    thread = kind(target=handle, name="busy")
    thread.start()
    try:
        assert begun.wait(60)
        frame = sys._current_frames()[thread.ident or 0]
        monkeypatch.setattr(deadlock, "current_frames", lambda: {thread.ident: frame})
        blocked = deadlock.describe_blocked(object(), handle.__code__, [], is_alone=True)
    finally:
        end.set()
        thread.join()
    assert blocked == deadlock.Blocked([], others)


MANY_LOOKS = """
import faulthandler, gc, sys, threading, time
from horo.diagnostics.frames import current_frames

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):  # Python code: another thread may go on
        for _ in range(50):
            pass

def look():
    while time.monotonic() < end:
        Garbage()
        assert threading.get_ident() in current_frames()

faulthandler.dump_traceback_later(60, exit=True)
sys.setswitchinterval(1e-6)
gc.set_threshold(1, 1, 1)
end = time.monotonic() + 2
threads = [threading.Thread(target=look) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""

GOES_ON = """
import faulthandler, gc, threading
from horo.diagnostics.deadlock import describe_blocked

DEADLINE_S = 60

def wait(self, handle):
    waits.set()
    assert ends.wait(DEADLINE_S)

def others(depth):  # take the memory of frames that are gone
    values = [depth], (depth,), {depth}
    return others(depth - 1) if depth else values

def work():
    wait(context, 7)
    others(50)
    gone.set()

def on_garbage(phase, info):
    global left
    if phase == "start" and threading.current_thread() is threading.main_thread():
        left -= 1
        if left == 0:
            ends.set()
            assert gone.wait(DEADLINE_S)

faulthandler.enable()
gc.callbacks.append(on_garbage)
context, number, left = object(), 0, 0
while left <= 0:  # at the first collection of a look, at the second, until there are no more
    number += 1
    waits, ends, gone = threading.Event(), threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    assert waits.wait(DEADLINE_S)
    gc.collect()  # frees the dicts that are kept to be used again
    left = number
    gc.set_threshold(1)
    describe_blocked(context, wait.__code__, [thread.ident])
    gc.set_threshold(700)
    ends.set()
    thread.join()
print("looks:", number > 1)
"""


def test_threads_that_look_while_garbage_is_collected_do_not_wait_for_each_other() -> None:
    """In the interpreter before 3.12 they did, within a second, and all others with them."""
    done = run_python("-c", MANY_LOOKS)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_thread_may_go_on_while_another_reads_its_frames() -> None:
    """In Python 3.11 the process ended by a segmentation fault."""
    done = run_python("-c", GOES_ON)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "looks: True\n")


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_afterwards_as_before(collects: bool) -> None:
    try:
        if not collects:
            gc.disable()
        assert threading.get_ident() in current_frames()
        assert gc.isenabled() == collects
    finally:
        gc.enable()


def test_a_python_that_collects_none_meanwhile_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = []
    monkeypatch.setattr(gc, "disable", lambda: pauses.append(1))
    current_frames()
    assert bool(pauses) == (sys.version_info < (3, 12))


INTERRUPTED = """
import atexit, signal
import torch
import horo.torch as hvd
from horo.core import context, log_lines
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
    "init": (
        "hvd.shutdown(); assert not hvd.is_initialized()",
        "job.connect = lambda *_, **k: interrupt(); hvd.init()",
    ),
    "the end of shutdown": (
        "hvd.shutdown(); assert runtime.core._context == ffi.NULL",
        "hvd.init(); runtime, forget = _runtime.current(), log_lines.LogLines.forget_context\n"
        "log_lines.LogLines.forget_context = lambda self: (interrupt(), forget(self))\n"
        "hvd.shutdown()",
    ),
    "operation": (
        "assert hvd.allreduce(torch.ones(1), name='in the handler').item() == 1",
        "hvd.init()\n"
        "class Kept(dict):\n"
        "    def setdefault(self, key, value): self.setdefault = super().setdefault; interrupt()\n"
        "_runtime.current().request_cache.kept = Kept()\n"
        "hvd.allreduce(torch.ones(1), name='x')",
    ),
}


def run(handler: str, program: str) -> tuple[object, str]:
    """With what a process that has imported torch before gives ``sys.exit()``, and what it prints."""

    def run_here(code: str) -> tuple[object, str]:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(code, {"__name__": "__main__"})
        except SystemExit as end:
            return end.code, printed.getvalue()
        return 0, printed.getvalue()

    with RankPool(1, init=False) as pool:
        (ended,) = pool.run(run_here, INTERRUPTED.format(handler=handler, program=program))
    return ended  # type: ignore[no-any-return]


@pytest.mark.parametrize("place", INTERRUPTIONS)
def test_a_signal_handler_may_do_what_it_has_interrupted(place: str) -> None:
    assert run(*INTERRUPTIONS[place]) == ("left", "")


def test_a_shutdown_that_a_handler_has_ended_by_an_exception_is_done_at_exit() -> None:
    program = """
atexit.register(lambda: print(runtime.core._context == ffi.NULL))  # behind all that is registered later
hvd.init()
runtime, forget = _runtime.current(), log_lines.LogLines.forget_context
log_lines.LogLines.forget_context = lambda self: (interrupt(), forget(self))
hvd.shutdown()
"""
    done = run_python("-c", INTERRUPTED.format(handler="pass", program=program), env=as_users_start())
    assert (done.returncode, done.stdout, done.stderr) == (1, "True\n", "left\n")


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
    assert run("hvd.shutdown(); return", program) == (0, "")


@pytest.mark.parametrize(
    ("interrupted", "program"),
    [
        ("init()", "connect = job.connect; job.connect = lambda *a, **k: interrupt() or connect(*a, **k); hvd.init()"),
        (
            "shutdown()",
            "hvd.init(); forget = log_lines.LogLines.forget_context\n"
            "log_lines.LogLines.forget_context = lambda self: (forget(self), interrupt())\n"
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
    assert run(handler, program) == (0, told)


def test_an_init_within_one_that_is_done_does_nothing() -> None:
    program = """
from horo.torch import lifecycle
lifecycle.register_all = lambda *_: interrupt()
hvd.init(process_sets=[[0]])
assert not signals and hvd.is_initialized()
"""
    assert run("hvd.init(); return", program) == (0, "")
