"""Real ranks that wait for one another end at once and say why; ranks that are late or stopped are waited for."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import TORCH_S, Hororun, make_remote_shell
from plain_ranks import PlainRanks
from rank_pool import RankPool

import horo.torch as hvd

everywhere = pytest.mark.parametrize("hosts", ["aa", "ab", "aabb", "abc"])

UNEVEN = """
import torch
import horo.torch as hvd
hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
loader = torch.utils.data.DataLoader(torch.randn(10 - hvd.rank(), 4), num_workers=WORKERS, batch_size=1)
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


@pytest.fixture
def hororun(tmp_path: Path) -> Iterator[Hororun]:
    runner = Hororun(make_remote_shell(tmp_path))
    yield runner
    runner.clean_up()


def assert_both_are_told(done: subprocess.CompletedProcess[str], waits: str) -> str:
    """Both ranks end with the error, whose pattern is returned; ``waits``: a pattern for what they wait for."""
    told = rf"DeadlockError: {waits}; {HINT}"
    assert done.returncode == 1, done.stderr
    assert len(re.findall(rf"^\[[01]\] horo\.errors\.{told}$", done.stderr, re.MULTILINE)) == 2, done.stderr
    return told


@pytest.mark.parametrize(
    ("workers", "where", "overlap"),  # each value of one with each value of another
    [
        (0, "localhost:2", "always"),
        (0, "one:1,two:1", "never"),
        (1, "localhost:2", "never"),
        (1, "one:1,two:1", "always"),
    ],
)
def test_a_rank_with_fewer_batches_is_told_and_reported(
    hororun: Hororun, tmp_path: Path, workers: int, where: str, overlap: str
) -> None:
    (tmp_path / "train.py").write_text(UNEVEN.replace("WORKERS", str(workers)))
    done = hororun.start(
        "-np", "2", "train.py", where=where, cwd=tmp_path, environment={"HORO_OVERLAP": overlap}
    ).finish(TORCH_S)
    told = assert_both_are_told(
        done,
        rf"rank 0 waits for 'gradient\.(weight|bias)' \(train\.py:{BACKWARD}\), "
        rf"rank 1 for 'allreduce\.epoch_loss' \(train\.py:{LOSS}\)",
    )
    assert re.search(rf"^hororun: rank [01] on \w+ ended with {told} \(train\.py, line", done.stderr, re.MULTILINE)


GAN = """
import torch
import horo.torch as hvd
hvd.init()
maker, critic = torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)
for model in (maker, critic):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), m) for m in (maker, critic)]
for step in range(2):
    made = maker(torch.ones(1, 2))
    optimizers[1].zero_grad()
    critic(made.detach()).sum().backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    if step == 0 or hvd.rank() == 0:
        critic(made).sum().backward()
    optimizers[0].step()
"""
SKIPPED, STEPPED = 16, 17


@pytest.mark.parametrize("overlap", ["always", "never"])
def test_a_rank_that_skips_the_backward_of_one_of_two_models_is_told(overlap: str) -> None:
    """The backward of rank 0 averages the gradients of both models, the step of rank 1 those of one."""

    def check(script: str) -> str:
        with pytest.raises(hvd.DeadlockError) as caught:
            exec(compile(script, "train.py", "exec"), {})
        return str(caught.value)

    pool = RankPool(2, init=False, environment={"HORO_OVERLAP": overlap, "HORO_DEADLOCK_TIME_SECONDS": "0.4"})
    try:
        told = pool.run(check, GAN)
    finally:
        pool.close()
    waits = (
        rf"rank 0 waits for 'gradient1?\.(weight|bias)[.a-z]*' \(train\.py:{SKIPPED}\), "
        rf"rank 1 for 'gradient1?\.(weight|bias)[.a-z]*' \(train\.py:{STEPPED}\)"
    )
    assert all(re.fullmatch(rf"{waits}; {HINT}", text) for text in told), told


LEAVES = """
import pathlib, signal, time
from horo.bootstrap.job import start
from horo.core.context import OPS, RequestBuffer
class Late(Exception):
    pass
def ring(*_):
    raise Late
def submit(name):
    return job.context.submit(RequestBuffer.of(OPS["barrier"], name))
job = start()
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
while not pathlib.Path("left").exists():
    time.sleep(0.01)
first = submit("first")
job.context.finish(first)
if job.rank == 0:
    second = submit("second")
job.context.finish(second)
job.close()
"""


@pytest.mark.parametrize("where", ["localhost:2", "one:1,two:1"])
def test_a_wait_that_a_signal_handler_ends_is_taken_back(hororun: Hororun, tmp_path: Path, where: str) -> None:
    """Rank 1 computes then, while rank 0 waits for what rank 1 will submit."""
    (tmp_path / "train.py").write_text(LEAVES)
    done = hororun.start("-np", "2", "train.py", where=where, cwd=tmp_path).finish(TORCH_S)
    assert done.returncode == 0, done.stderr


HANDLER = """
import os, pathlib, signal, time
from horo.bootstrap.job import start
from horo.core.context import OPS, RequestBuffer
def submit(name):
    return job.context.submit(RequestBuffer.of(OPS["barrier"], name))
def save(*_):
    pathlib.Path("saves").touch()
    time.sleep(1.5)  # the stimulus: rank 0 waits and says so meanwhile
    job.context.finish(submit("saved"))
job = start()
if job.rank == 1:
    signal.signal(signal.SIGUSR1, save)
    pathlib.Path("pid.part").write_text(str(os.getpid()))
    pathlib.Path("pid.part").rename("pid")
else:
    while not pathlib.Path("pid").exists():
        time.sleep(0.01)
    time.sleep(1)  # the stimulus: rank 1 waits and says so
    os.kill(int(pathlib.Path("pid").read_text()), signal.SIGUSR1)
    while not pathlib.Path("saves").exists():
        time.sleep(0.01)
    job.context.finish(submit("saved"))
job.context.finish(submit("end"))
job.close()
"""


@pytest.mark.parametrize("where", ["localhost:2", "one:1,two:1"])
def test_a_handler_that_runs_on_top_of_a_wait_is_waited_for(hororun: Hororun, tmp_path: Path, where: str) -> None:
    """It began after its rank had said that it waits, and submits what the other one waits for."""
    (tmp_path / "train.py").write_text(HANDLER)
    done = hororun.start("-np", "2", "train.py", where=where, cwd=tmp_path).finish(TORCH_S)
    assert done.returncode == 0, done.stderr


ALARM = """
import signal
import torch
import horo.torch as hvd
class Late(Exception):
    pass
def ring(*_):
    raise Late
hvd.init()
if hvd.rank() == 1:
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 3)
    try:
        hvd.allreduce(torch.ones(1), name="second")
    except Late:
        pass
hvd.allreduce(torch.ones(1), name="first")
if hvd.rank() == 0:
    hvd.allreduce(torch.ones(1), name="second")
hvd.barrier()  # rank 1 has left its wait for "second", so it must not end before that is done
print("done")
"""


def test_an_alarm_that_may_end_a_wait_is_waited_for(hororun: Hororun, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ALARM)
    done = hororun.start("-np", "2", "--no-prefix", "train.py", where="localhost:2", cwd=tmp_path).finish(TORCH_S)
    assert (done.returncode, done.stdout) == (0, "done\ndone\n"), done.stderr


@everywhere
def test_all_ranks_end_and_later_calls_fail(tmp_path: Path, hosts: str) -> None:
    with PlainRanks(tmp_path, hosts) as ranks:
        ranks.all("start")
        ranks.all("allreduce", "x")
        last = len(hosts) - 1
        for rank in range(len(hosts)):
            ranks.tell(rank, "allreduce", "own" if rank == last else "other")
        answers = [ranks.answer(rank) for rank in range(len(hosts))]
        assert {answer.get("error") for answer in answers} == {"DeadlockError"}, answers
        assert {answer["lost"] for answer in answers} == {True}
        assert len({answer["text"] for answer in answers}) == 1
        assert f"rank {last} for 'own' (plain_rank.py:" in answers[0]["text"]
        for rank in range(len(hosts)):
            ranks.tell(rank, "allreduce", "x")
        assert {ranks.answer(rank)["error"] for rank in range(len(hosts))} == {"DeadlockError"}
        ranks.all("close")
        assert set(ranks.finish()) == {0}


@everywhere
def test_a_job_may_start_again_after_it(tmp_path: Path, hosts: str) -> None:
    with PlainRanks(tmp_path, hosts) as ranks:
        for _ in range(2):
            ranks.all("start")
            for rank in range(len(hosts)):
                ranks.tell(rank, "allreduce", f"own {rank}")
            assert {ranks.answer(rank)["error"] for rank in range(len(hosts))} == {"DeadlockError"}
            ranks.all("close")
        assert set(ranks.finish()) == {0}


@everywhere
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("waits_before", [False, True])
def test_a_rank_that_is_stopped_is_waited_for(tmp_path: Path, hosts: str, victim: int, waits_before: bool) -> None:
    """It is stopped while it computes, or while it waits and has said so, for what the others submit only then."""
    with PlainRanks(tmp_path, hosts) as ranks:
        ranks.all("start")
        ranks.all("allreduce", "before")
        if waits_before:
            ranks.tell(victim, "allreduce", "x")
            time.sleep(LONG_S)
        ranks.kill(victim, signal.SIGSTOP)
        for rank in range(len(hosts)):
            if rank != victim or not waits_before:
                ranks.tell(rank, "allreduce", "x")
        time.sleep(LONG_S)
        ranks.kill(victim, signal.SIGCONT)
        total = float(sum(range(len(hosts) + 1)))
        assert [ranks.value(rank) for rank in range(len(hosts))] == [[total, total]] * len(hosts)
        ranks.all("close")
        assert set(ranks.finish()) == {0}


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
