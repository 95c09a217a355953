"""A rank that dies or is stopped is named by every other; ranks that wait for one another end at once and say why."""

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from jobs import PLAIN_RANK, TORCH_S, Hororun, wait_until
from plain_ranks import PlainRanks
from rank_pool import on_own
from small_model import made, take_step, train

import horo.torch as hvd
from horo.errors import DeadlockError

LARGE = 4 << 20
"""Numbers in a tensor that takes long enough to be killed in the middle of it."""
WHERE = [("aa", 1), ("aaa", 0), ("aabb", 0), ("aabb", 3)]
"""Hosts of the ranks and the rank that dies: a leader, another, on the first and on the second host."""
WAYS = (
    r"rank {rank} \(host-{host}\) is gone: "
    r"(its process ended without shutting horo down|the connection to it was closed, seen from rank \d \(host-[ab]\))"
)

PENDING = "; pending here: 'x'"
REFUSED = f"({PENDING})?"
"""Whoever submits when it is known already has nothing pending."""

everywhere = pytest.mark.parametrize(("hosts", "victim"), WHERE)


def check_lost(ranks: PlainRanks, told: Sequence[int], victim: int, pending: str) -> None:
    """Every rank told to do something answers that the victim is gone, and ``pending`` (a pattern)."""
    for rank in told:
        answer = ranks.answer(rank)
        while answer == {"value": "going"}:
            answer = ranks.answer(rank)
        assert (answer.get("error"), answer.get("lost")) == ("PeerLostError", True), f"rank {rank}: {answer}"
        ways = WAYS.format(rank=victim, host=ranks.hosts[victim])
        assert re.search(rf"^{ways}{pending}$", answer["text"]), f"rank {rank}: {answer}"


def others(hosts: str, victim: int) -> list[int]:
    return [rank for rank in range(len(hosts)) if rank != victim]


@everywhere
def test_waiting_ranks_get_the_error(tmp_path: Path, hosts: str, victim: int) -> None:
    with PlainRanks(tmp_path, hosts) as ranks:
        ranks.all("start")
        for rank in ranks.tell_others(victim, "submit", "x"):
            ranks.value(rank)
        told = ranks.tell_others(victim, "wait", "x")
        ranks.kill(victim)
        check_lost(ranks, told, victim, PENDING)
        ranks.tell_others(victim, "allreduce", "x")
        check_lost(ranks, told, victim, "")
        ranks.all("close", ranks=told)
        assert ranks.finish() == [-signal.SIGKILL if rank == victim else 0 for rank in range(len(hosts))]


@everywhere
def test_ranks_in_the_middle_of_large_transfers_get_the_error(tmp_path: Path, hosts: str, victim: int) -> None:
    with PlainRanks(tmp_path, hosts) as ranks:
        ranks.all("start")
        assert set(ranks.all("repeat", "x", LARGE, 1000)) == {"going"}
        ranks.kill(victim)
        check_lost(ranks, others(hosts, victim), victim, REFUSED)


@pytest.mark.parametrize(("hosts", "victim", "follower"), [("aab", 1, 0), ("aabb", 0, 1), ("aabb", 1, 0)])
def test_ranks_that_end_at_an_error_are_not_its_cause(tmp_path: Path, hosts: str, victim: int, follower: int) -> None:
    with PlainRanks(tmp_path, hosts) as ranks:
        ranks.all("start")
        ranks.all("be_hasty")
        ranks.all("repeat", "x", LARGE, 1000)
        for rank in range(2, len(hosts)):
            ranks.kill(rank, signal.SIGSTOP)
        ranks.kill(victim)
        ranks.processes[follower].wait()
        for rank in reversed(range(2, len(hosts))):  # by now all links to the first host have ended
            ranks.kill(rank, signal.SIGCONT)
        check_lost(ranks, others(hosts, victim), victim, REFUSED)


@pytest.mark.parametrize(
    ("hosts", "victim", "end"), [("aaa", 0, "close"), ("aaa", 0, "exit"), ("aabb", 0, "exit"), ("aabb", 3, "close")]
)
def test_a_rank_that_comes_last_names_the_first_that_died_and_not_of_those_that_left_for_it(
    tmp_path: Path, hosts: str, victim: int, end: str
) -> None:
    with PlainRanks(tmp_path, hosts) as ranks:
        ranks.all("start")
        ranks.all("allreduce", "before")
        ranks.kill(victim)
        ranks.processes[victim].wait()
        for rank in others(hosts, victim):
            ranks.tell(rank, "allreduce", "x")
            check_lost(ranks, [rank], victim, REFUSED)
            if end == "close":
                ranks.all("close", ranks=[rank])
            else:
                ranks.tell(rank, "exit", 3)
                ranks.processes[rank].wait()


@pytest.mark.parametrize(
    ("hosts", "victim", "where", "name"),
    [
        ("aabb", 0, "Rendezvous", "publish"),
        ("aaa", 2, "module", "join_arena"),
        ("aabb", 0, "module", "connect_hosts"),
        ("aaa", 2, "Rendezvous", "finish"),
    ],
)
def test_ranks_inside_init_get_the_error(tmp_path: Path, hosts: str, victim: int, where: str, name: str) -> None:
    with PlainRanks(tmp_path, hosts) as ranks:
        told = ranks.tell_others(victim, "start")
        ranks.tell(victim, "start_and_die_in", where, name)
        for rank in told:
            answer = ranks.answer(rank)
            assert (answer.get("error"), answer.get("lost")) == ("PeerLostError", True), f"rank {rank}: {answer}"
            assert f"rank {victim} (host-{hosts[victim]}) died while init() was running" in answer["text"]
        assert ranks.finish() == [-signal.SIGKILL if rank == victim else 0 for rank in range(len(hosts))]


def test_a_rank_that_dies_right_after_init_is_an_error_of_the_first_call(tmp_path: Path) -> None:
    with PlainRanks(tmp_path, "aab") as ranks:
        ranks.tell_others(1, "start")
        ranks.tell(1, "start_and_die_in", "module", "RunningRank")
        ranks.processes[1].wait()
        assert [ranks.value(rank) for rank in (0, 2)] == [[0, 3], [2, 3]]
        check_lost(ranks, ranks.tell_others(1, "allreduce", "x"), 1, REFUSED)


WARN = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5"}
GIVE_UP_S = 4
"""No rank is held up for so long because the machine is busy: it would be named beside the one that is stopped."""
GIVE_UP = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(GIVE_UP_S)}

where_one_stops = pytest.mark.parametrize(("hosts", "victim"), [("aa", 0), ("aa", 1), ("ab", 0), ("aabb", 1)])


def in_the_log_of_one(ranks: PlainRanks, said: str, told: Sequence[int]) -> None:
    pattern = re.compile(said)
    wait_until(lambda: any(pattern.search(ranks.log(rank)) for rank in told), f"{said} in the log of one of {told}")


@where_one_stops
def test_a_stopped_rank_is_named_with_what_it_lacks_and_may_go_on(tmp_path: Path, hosts: str, victim: int) -> None:
    """And one that is only late says where it stands."""
    with PlainRanks(tmp_path, hosts, WARN) as ranks:
        ranks.all("start")
        ranks.all("allreduce", "x")
        told = ranks.tell_others(victim, "allreduce", "x")
        heading = rf"horo \[{victim}\] warning: another rank waits for this one, which stands here:\nthread"
        in_the_log_of_one(
            ranks, rf"{heading} 'MainThread':(.|\n)*plain_rank\.py\", line \d+, in main\n +for line in sys", [victim]
        )
        ranks.tell(victim, "allreduce", "x")
        ranks.assert_sum_is_of_all()
        ranks.kill(victim, signal.SIGSTOP)
        ranks.tell_others(victim, "allreduce", "y")
        ranks.tell(victim, "allreduce", "y")
        # The one that is stopped may also be the only one that could tell who is missing.
        name = rf"rank {victim} \(host-{hosts[victim]}\)"
        in_the_log_of_one(ranks, rf"{name} has not submitted 'y'|'y' \(no answer from {name}\)", told)
        ranks.kill(victim, signal.SIGCONT)
        ranks.assert_sum_is_of_all()
        ranks.shut_down()


@where_one_stops
def test_ranks_give_up_a_stopped_one_where_they_are_told_to(tmp_path: Path, hosts: str, victim: int) -> None:
    with PlainRanks(tmp_path, hosts, GIVE_UP) as ranks:
        ranks.all("start")
        ranks.all("allreduce", "x")
        ranks.kill(victim, signal.SIGSTOP)
        for rank in ranks.tell_others(victim, "allreduce", "x"):
            answer = ranks.answer(rank)
            assert (answer.get("error"), answer.get("lost")) == ("StalledError", True), f"rank {rank}: {answer}"
            told = rf"rank {victim} \(host-{hosts[victim]}\) has not submitted what others.*; pending here: 'x'"
            assert re.fullmatch(told, answer["text"]), answer


@pytest.mark.parametrize(("hosts", "victim"), [("aaa", 1), ("abc", 1)])
def test_beside_a_join_only_the_rank_that_is_late_says_where_it_stands(tmp_path: Path, hosts: str, victim: int) -> None:
    """One has joined, one waits for what the last has not submitted: it has not joined either, but is not to blame."""
    joined, waits = (rank for rank in range(3) if rank != victim)
    with PlainRanks(tmp_path, hosts, WARN) as ranks:
        ranks.all("start")
        ranks.all("allreduce", "x")
        ranks.tell(joined, "join")
        ranks.tell(waits, "allreduce", "x")
        heading = "another rank waits for this one, which stands here"
        in_the_log_of_one(ranks, heading, [victim])
        ranks.tell(victim, "allreduce", "x")
        total = float(waits + victim + 2)
        assert [ranks.value(rank) for rank in sorted((waits, victim))] == [[total, total]] * 2
        ranks.tell_others(joined, "join")
        assert len({ranks.value(rank) for rank in range(3)}) == 1
        ranks.shut_down()
        assert [rank for rank in range(3) if heading in ranks.log(rank)] == [victim]


def test_a_rank_whose_interpreter_is_busy_does_not_answer(tmp_path: Path) -> None:
    with PlainRanks(tmp_path, "abb", WARN) as ranks:
        ranks.all("start")
        ranks.all("allreduce", "x")
        fifo = tmp_path / "go on"
        os.mkfifo(fifo)
        ranks.tell(1, "keep_interpreter", str(fifo))
        ranks.tell_others(1, "allreduce", "x")
        said = r"rank 1 \(host-b\) does not answer where it stands: its Python interpreter is busy"
        in_the_log_of_one(ranks, said, range(3))
        fifo.write_bytes(b"x")
        assert ranks.value(1) is None
        ranks.tell(1, "allreduce", "x")
        ranks.assert_sum_is_of_all()
        ranks.shut_down()


def test_all_that_wait_show_what_they_did_last_at_a_stall_and_at_a_loss(tmp_path: Path) -> None:
    with PlainRanks(tmp_path, "aab", WARN) as ranks:
        ranks.all("start")
        ranks.all("allreduce", "done")
        ranks.kill(1, signal.SIGSTOP)
        ranks.tell_others(1, "allreduce", "late")
        ago = r"\n *\d+\.\d{3} s ago  "
        last = rf"finished   allreduce 'done', 3\.9 KiB{ago}submitted  allreduce 'late', 3\.9 KiB"
        for rank in (0, 2):
            in_the_log_of_one(ranks, rf"horo \[{rank}\] warning: the last events on this rank(.|\n)*{last}\n", [rank])
        ranks.kill(1)
        for rank in (0, 2):
            assert ranks.answer(rank)["error"] == "PeerLostError"
            end = rf"{last}{ago}the group ended: peer lost, rank 1\n"
            block = rf"horo \[{rank}\] error: the last events on this rank(.|\n)*{end}"
            assert re.search(block, ranks.log(rank)), ranks.log(rank)


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


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORO_DEADLOCK_TIME_SECONDS", "0.4")


@pytest.mark.usefixtures("soon")
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
    place = r"\(test_ranks_loss\.py:\d+\)"
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


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("where", ["localhost:2", "one:1,two:1"])
@pytest.mark.parametrize("script", WAITED_FOR.values(), ids=list(WAITED_FOR))
def test_a_rank_with_a_signal_handler_is_waited_for(hororun: Hororun, tmp_path: Path, where: str, script: str) -> None:
    (tmp_path / "train.py").write_text(f"{HEAD}{script}job.close()\n")
    done = hororun.start("-np", "2", "train.py", where=where, cwd=tmp_path).finish(TORCH_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("soon")
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


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("script", NOT_BLOCKED.values(), ids=list(NOT_BLOCKED))
def test_a_thread_that_may_still_submit_something_is_waited_for(hororun: Hororun, tmp_path: Path, script: str) -> None:
    """Also where it has not called horo before."""
    head = f"""{PLAIN_RANK}
import time
rank = Rank()
number, _ = rank.start()

def wait_until_all_wait():
    time.sleep(1.5)  # the stimulus: threads that wait report after 0.4 s
"""
    (tmp_path / "train.py").write_text(f"{head}{script}rank.close()\nprint('done')\n")
    done = hororun.start("-np", "2", "--no-prefix", "train.py", where="localhost:2", cwd=tmp_path).finish()
    assert (done.returncode, done.stdout) == (0, "done\ndone\n"), done.stderr
