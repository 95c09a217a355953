"""Real ranks that wait for one another end at once and say why; ranks that are late or stopped are waited for."""

import re
import signal
import time
from pathlib import Path

import pytest
import torch
from jobs import TORCH_S, Hororun
from plain_ranks import PlainRanks
from rank_pool import on_own
from small_model import made, take_step, train

import horo.torch as hvd
from horo.errors import DeadlockError

UNEVEN = """
import torch
import horo.torch as hvd
hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
loader = torch.utils.data.DataLoader(torch.randn(10 - hvd.rank(), 4), num_workers=1, batch_size=1)
for batch in loader:
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
hvd.allreduce(torch.ones(1), name="epoch_loss")
"""
BACKWARD, LOSS = 11, 13
HINT = r"has a rank fewer batches, or has it skipped a backward\(\) or step\(\)\?"
LONG_S = 0.8
"""A rank that waits so long has said so."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORO_DEADLOCK_TIME_SECONDS", "0.4")


def test_fewer_batches_are_reported(hororun: Hororun, tmp_path: Path) -> None:
    """Both ranks end with the error, and hororun reports it."""
    (tmp_path / "train.py").write_text(UNEVEN)
    job = hororun.start(
        "-np", "2", "train.py", where="one:1,two:1", cwd=tmp_path, environment={"HORO_OVERLAP": "never"}
    )
    done = job.finish(TORCH_S)
    first = rf"rank 0 waits for 'gradient\.(weight|bias)' \(train\.py:{BACKWARD}\)"
    told = rf"DeadlockError: {first}, rank 1 for 'allreduce\.epoch_loss' \(train\.py:{LOSS}\); {HINT}"
    assert done.returncode == 1, done.stderr
    assert len(re.findall(rf"^\[[01]\] horo\.errors\.{told}$", done.stderr, re.MULTILINE)) == 2, done.stderr
    assert re.search(rf"^hororun: rank [01] on \w+ ended with {told} \(train\.py, line", done.stderr, re.MULTILINE)


@on_own(2, HORO_DEADLOCK_TIME_SECONDS="0.4", HORO_OVERLAP="always")
def test_gradients_that_travel_while_backward_runs_are_reported() -> None:
    model, optimizer = made()
    train(model, optimizer, 0)
    told = rf"^rank 0 waits for 'gradient\.\S+' \(\S+:\d+\), rank 1 for 'allreduce\.loss' \(\S+:\d+\); {HINT}"
    with pytest.raises(DeadlockError, match=told):
        take_step(model, optimizer) if hvd.rank() == 0 else hvd.allreduce(torch.ones(1), name="loss")


@on_own(2, HORO_DEADLOCK_TIME_SECONDS="0.4")
def test_calls_with_objects_have_the_names_that_the_script_gave_them() -> None:
    place = r"\(test_ranks_deadlock\.py:\d+\)"
    told = rf"^rank 0 waits for 'hvd\.shard' {place}, rank 1 for 'broadcast_object\.settings' {place}"
    with pytest.raises(DeadlockError, match=told) as caught:
        if hvd.rank() == 0:
            next(iter(hvd.shard(torch.utils.data.DataLoader(torch.arange(8.0)))))
        hvd.broadcast_object(1, name="settings")
    assert "-header" not in str(caught.value)


HEAD = """
import os, pathlib, signal, time
from horo.bootstrap.job import start
from horo.core.context import OPS, RequestBuffer
class Late(Exception):
    pass
def ring(*_):
    raise Late
def submit(name):
    return job.context.submit(RequestBuffer.of(OPS["barrier"], name))
def await_file(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)
def save(*_):
    pathlib.Path("saves").touch()
    time.sleep(1.5)  # the stimulus: rank 0 waits and says so meanwhile
    job.context.finish(submit("saved"))
job = start()
"""
WAITED_FOR = {
    "a wait that a signal handler ends is taken back, and its rank computes": """
if job.rank == 1:
    signal.signal(signal.SIGALRM, ring)
    second = submit("second")
    signal.setitimer(signal.ITIMER_REAL, 1.5)
    try:
        job.context.wait(second)
    except Late:
        pass
    pathlib.Path("left").touch()
    time.sleep(2)
await_file("left")
job.context.finish(submit("first"))
if job.rank == 0:
    second = submit("second")
job.context.finish(second)
""",
    "a handler on top of a wait submits what the other rank waits for": """
if job.rank == 1:
    signal.signal(signal.SIGUSR1, save)
    pathlib.Path("pid.part").write_text(str(os.getpid()))
    pathlib.Path("pid.part").rename("pid")
else:
    await_file("pid")
    time.sleep(1)  # the stimulus: rank 1 waits and says so
    os.kill(int(pathlib.Path("pid").read_text()), signal.SIGUSR1)
    await_file("saves")
    job.context.finish(submit("saved"))
job.context.finish(submit("end"))
""",
}


@pytest.mark.parametrize("where", ["localhost:2", "one:1,two:1"])
@pytest.mark.parametrize("script", WAITED_FOR.values(), ids=list(WAITED_FOR))
def test_a_rank_with_a_signal_handler_is_waited_for(hororun: Hororun, tmp_path: Path, where: str, script: str) -> None:
    (tmp_path / "train.py").write_text(f"{HEAD}{script}job.close()\n")
    done = hororun.start("-np", "2", "train.py", where=where, cwd=tmp_path).finish(TORCH_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("hosts", "victim", "waits_before"), [("aa", 0, False), ("aa", 1, True), ("aabb", 1, False), ("abc", 0, True)]
)
def test_a_rank_that_is_stopped_is_waited_for(tmp_path: Path, hosts: str, victim: int, waits_before: bool) -> None:
    """It is stopped while it computes, or while it waits and has said so, for what the others submit only then."""
    with PlainRanks(tmp_path, hosts) as ranks:
        ranks.all("start")
        ranks.all("allreduce", "before")
        if waits_before:
            ranks.tell(victim, "allreduce", "x")
            time.sleep(LONG_S)
        ranks.kill(victim, signal.SIGSTOP)
        ranks.tell_others(victim, "allreduce", "x")
        if not waits_before:
            ranks.tell(victim, "allreduce", "x")
        time.sleep(LONG_S)
        ranks.kill(victim, signal.SIGCONT)
        ranks.assert_sum_is_of_all()
        ranks.shut_down()


NOT_BLOCKED = {
    "the main thread computes": """
import concurrent.futures
with concurrent.futures.ThreadPoolExecutor(1) as pool:
    first = pool.submit(rank.allreduce, "first" if number else "second")
    wait_until_all_wait()
    rank.allreduce("second" if number else "first")
    first.result()
""",
    "the main thread awaits a timer": """
import asyncio
async def main():
    loop = asyncio.get_running_loop()
    def reduce(name):
        return loop.run_in_executor(None, rank.allreduce, name)
    first = reduce("first" if number else "second")
    await asyncio.sleep(1.5)
    await asyncio.gather(first, reduce("second" if number else "first"))
asyncio.run(main())
""",
    "a new thread computes": """
import threading
def late():
    wait_until_all_wait()
    rank.allreduce("second" if number else "first")
thread = threading.Thread(target=late)
thread.start()
rank.allreduce("first" if number else "second")
thread.join()
""",
}


@pytest.mark.parametrize("script", NOT_BLOCKED.values(), ids=list(NOT_BLOCKED))
def test_a_thread_that_may_still_submit_something_is_waited_for(hororun: Hororun, tmp_path: Path, script: str) -> None:
    """Also where it has not called horo before."""
    head = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).resolve().parent.parent)!r})
from plain_rank import Rank
rank = Rank()
number, _ = rank.start()

def wait_until_all_wait():
    time.sleep(1.5)  # the stimulus: threads that wait report after 0.4 s
"""
    (tmp_path / "train.py").write_text(f"{head}{script}rank.close()\nprint('done')\n")
    done = hororun.start("-np", "2", "--no-prefix", "train.py", where="localhost:2", cwd=tmp_path).finish()
    assert (done.returncode, done.stdout) == (0, "done\ndone\n"), done.stderr
