"""Signals and the lock of the interpreter in the middle of an operation that a stopped peer holds up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BEGIN = """
import os, signal, sys, threading, time
import numpy as np
from fabric import close_setup, make_setups
from ranks import Rank
from horo.core.context import Context
from horo.errors import HoroError

def make_rank(**options):
    setups = make_setups([2], segment_bytes=1 << 16, stall_warning_ms=0, **options)
    child = os.fork()
    me = 1 if child == 0 else 0
    close_setup(setups[1 - me])
    return Rank(Context(setups[me])), child

def stop_in_the_middle(rank, data):
    '''An allreduce in which this process stops itself when the first segment has come and hundreds are due.'''
    data[:] = 1
    handle = rank.submit("allreduce", "x", [data], reduce_op=1)
    while data[0] == 1:
        pass
    os.kill(os.getpid(), signal.SIGSTOP)
    rank.finish(handle)

def await_stop(process):
    while open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
"""

SPINNING = """
# Spins of 0.4 s instead of a millisecond, so that the signal surely comes in one. The first call makes links and life
# lines be watched, after which no wait ends by itself any more.
rank, child = make_rank(spin_us=400_000, sleeps_under_contention=False)
data = np.ones(16 << 20, np.float32)
if rank.rank == 1:
    for _ in range(2):
        try:
            stop_in_the_middle(rank, data)
        except HoroError:
            pass
    os._exit(0)
me = os.getpid()
hand = os.fork()
if hand == 0:
    await_stop(child)
    time.sleep(2)
    os.kill(child, signal.SIGCONT)
    await_stop(me)  # it stops itself between the two calls
    os.kill(me, signal.SIGCONT)
    await_stop(child)
    time.sleep(0.1)
    os.kill(me, signal.SIGINT)
    time.sleep(6)
    os.kill(child, signal.SIGKILL)  # ends a wait that does not end by itself
    os._exit(0)
data[:] = 1
rank.run("allreduce", "x", [data], reduce_op=1)
os.kill(me, signal.SIGSTOP)
try:
    while True:  # once, unless the peer was stopped so late that the operation was over
        data[:] = 1
        rank.run("allreduce", "x", [data], reduce_op=1)
except KeyboardInterrupt:
    waited = os.waitpid(hand, os.WNOHANG) == (0, 0)
    print("interrupted" if waited else "interrupted only when the peer had gone")
except HoroError as error:
    print(type(error).__name__, error)
sys.stdout.flush()
for process in (hand, child):
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        pass
os._exit(0)
"""

HOLDING = """
import ctypes
# A thread of rank 0 keeps the interpreter's lock for 6 s, as an extension does that computes without releasing it.
# Rank 1 stops for 1.5 s meanwhile, so that rank 0's wait inside the operation lasts.
rank, child = make_rank()
data = np.ones(16 << 20, np.float32)
if rank.rank == 1:
    hand = os.fork()
    if hand == 0:
        stopped = os.getppid()
        await_stop(stopped)
        time.sleep(1.5)
        os.kill(stopped, signal.SIGCONT)
        os._exit(0)
    stop_in_the_middle(rank, data)
    print("peer done", time.monotonic(), flush=True)
    os._exit(0)
data[:] = 1
handle = rank.submit("allreduce", "x", [data], reduce_op=1)
while data[0] == 1:
    pass
ctypes.PyDLL(None).usleep(6_000_000)
held_until = time.monotonic()
rank.finish(handle)
os.waitpid(child, 0)
print("held until", held_until, flush=True)
os._exit(0)
"""


def run(script: str) -> str:
    folder = Path(__file__).resolve().parent
    path = [str(folder), str(folder.parent), str(folder.parent.parent)]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{BEGIN}{script}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_ctrl_c_ends_a_wait_that_spins_in_the_middle_of_an_operation() -> None:
    assert run(SPINNING).strip() == "interrupted"


def test_a_peer_does_not_wait_for_the_interpreter_of_a_rank_in_the_middle_of_an_operation() -> None:
    times = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in run(HOLDING).splitlines()}
    assert times["peer done"] < times["held until"] - 1, times
