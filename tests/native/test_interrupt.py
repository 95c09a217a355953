"""Ctrl-C while a rank waits: in the middle of an operation that a stopped peer never finishes, and before one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, threading, time
import numpy as np
from fabric import close_setup, make_setups
from ranks import Rank
from horo.core.context import Context

setups = make_setups([2], segment_bytes=1 << 16, spin_us=0)
child = os.fork()
me = 1 if child == 0 else 0
close_setup(setups[1 - me])
rank = Rank(Context(setups[me]))
data = np.ones(8 << 20, np.float32)
if me == 1:
    while True:
        rank.allreduce(data)
def reduce():
    if sys.argv[2] == "run":
        rank.run("allreduce", "x", [data], reduce_op=1)
    else:
        rank.allreduce(data, sync=True)
for _ in range(2):
    reduce()
begun, handled, calls = threading.Event(), threading.Event(), 0
def handle(*_):
    print("handled", flush=True)
    handled.set()
if sys.argv[1] == "handled":
    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
def signals():
    begun.wait()
    time.sleep(0.05)
    os.kill(child, signal.SIGSTOP)
    before = None
    while before != calls:  # until the main thread is in the call that does not end
        before = calls
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)
    if sys.argv[1] == "handled":
        handled.wait()
        os.kill(child, signal.SIGCONT)
        while calls < before + 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=signals, daemon=True).start()
try:
    begun.set()
    while True:
        reduce()
        calls += 1
except KeyboardInterrupt:
    print("interrupted", flush=True)
finally:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
rank.context.destroy()
print("destroyed", flush=True)
"""


def run(mode: str, call: str) -> list[str]:
    folder = Path(__file__).resolve().parent
    path = [str(folder), str(folder.parent), str(folder.parent.parent)]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{SCRIPT}", mode, call],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.parametrize("call", ["run", "submit"])
def test_ctrl_c_ends_a_wait_for_a_stopped_peer(call: str) -> None:
    assert run("raise", call) == ["interrupted", "destroyed"]


@pytest.mark.parametrize("call", ["run", "submit"])
def test_a_signal_whose_handler_returns_changes_nothing(call: str) -> None:
    assert run("handled", call) == ["handled", "interrupted", "destroyed"]
