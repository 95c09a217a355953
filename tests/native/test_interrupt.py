"""Signals and the lock of the interpreter while a rank waits for an operation that a stopped peer holds up."""

import pytest
from ranks import run_script

HEAD = """
import ctypes, os, select, signal, struct, sys, threading, time
import numpy as np
from ranks import forked

done = os.pipe()
rank, others = forked([2], segment_bytes=1 << 16, spin_us=0, stall_warning_ms=0)
me, child = rank.rank, others.get(1)
"""

STOPPED = """
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


@pytest.mark.parametrize("call", ["run", "submit"])
@pytest.mark.parametrize(("way", "said"), [("raise", []), ("handled", ["handled"])])
def test_ctrl_c_ends_a_wait_for_a_stopped_peer_unless_its_handler_returns(call: str, way: str, said: list[str]) -> None:
    assert run_script(HEAD + STOPPED, way, call).split() == [*said, "interrupted", "destroyed"]


HOLDING = """
# A thread of rank 0 keeps the interpreter's lock until rank 1 is done, as an extension does that computes without
# releasing it. Rank 1 stops for 1.5 s meanwhile, when the first segment has come and hundreds are due, so that rank 0's
# wait inside the operation lasts.
if me == 1 and os.fork() == 0:
    stopped = os.getppid()
    while open(f"/proc/{stopped}/stat").read().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    time.sleep(1.5)
    os.kill(stopped, signal.SIGCONT)
    os._exit(0)
data = np.ones(16 << 20, np.float32)
handle = rank.submit("allreduce", "x", [data], reduce_op=1)
while data[0] == 1:
    pass
if me == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
    rank.finish(handle)
    os.write(done[1], b"x")
    os._exit(0)
ended = ctypes.create_string_buffer(struct.pack("ihh", done[0], select.POLLIN, 0))
print(ctypes.PyDLL(None).poll(ended, 1, 30_000), flush=True)
rank.finish(handle)
os.waitpid(child, 0)
os._exit(0)
"""


def test_a_peer_does_not_wait_for_the_interpreter_of_a_rank_in_the_middle_of_an_operation() -> None:
    assert run_script(HEAD + HOLDING) == "1\n"
