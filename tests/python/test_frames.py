"""The frames of all threads, while garbage is collected and threads come and go."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from horo._frames import current_frames

MANY_LOOKS = """
import faulthandler, gc, sys, threading, time
from horo._frames import current_frames

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


def test_threads_that_look_while_garbage_is_collected_do_not_wait_for_each_other() -> None:
    """In the interpreter before 3.12 they did, within a second, and all others with them."""
    done = subprocess.run([sys.executable, "-c", MANY_LOOKS], capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_afterwards_as_before(collects: bool) -> None:
    try:
        if not collects:
            gc.disable()
        assert threading.get_ident() in current_frames()
        assert gc.isenabled() == collects
    finally:
        gc.enable()
