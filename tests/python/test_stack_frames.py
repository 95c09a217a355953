"""The frames of all threads, while garbage is collected and threads come and go."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from horo.diagnostics.frames import current_frames

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
    done = subprocess.run([sys.executable, "-c", MANY_LOOKS], capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_thread_may_go_on_while_another_reads_its_frames() -> None:
    """In Python 3.11 the process ended by a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", GOES_ON], capture_output=True, text=True, timeout=90, check=False)
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
