"""Requests with a timeout: the group ends on all ranks, and the error names the operation and who has not called it."""

import re
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from ranks import Group, Rank, on_ranks, run_script, wait_for

from horo.errors import TimeoutError

SECONDS = 0.8
TIMEOUT_MS = int(SECONDS * 1000)
WITHIN = f"within the timeout of {SECONDS:g} s"
LATE_S = 30.0
"""The core ends the group 0.5 to 1 s after the timeout at the latest; the rest is for a busy machine."""
EASY_MS = 3000
"""No rank of two that are both at it is held up for so long."""


def fails(rank: Rank, name: str | None = "x", **options: object) -> str:
    """What a collective of the rank fails with."""
    began = time.monotonic()
    handle = rank.submit("barrier", name, [], timeout_ms=TIMEOUT_MS, **options)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError) as error:
        rank.finish(handle)
    assert time.monotonic() - began < LATE_S  # less than the timeout where another rank has called it before
    return str(error.value)


def end_of(rank: Rank) -> str:
    """Of the group, which a program that computes meanwhile learns afterwards."""
    wait_for(lambda: rank.context.health() is not None)
    return str(rank.context.health())


MISSING = [
    pytest.param([2], [1], r"rank 1 \(host0\) has", id="a rank"),
    pytest.param([2], [0], r"rank 0 \(host0\) has", id="the leader"),
    pytest.param([4], [0, 3], r"ranks 0, 3 \(host0\) have", id="two ranks"),
    pytest.param([2, 2], [3], r"rank 3 \(host1\) has", id="on the other host"),
    pytest.param([2, 2], [2, 3], r"ranks 2, 3 \(host1\) have", id="a host"),
    pytest.param([2, 2], [0, 1], r"ranks 0, 1 \(host0\) have", id="the host of the root"),
    pytest.param([1, 1, 1, 1], [3], r"rank 3 \(host3\) has", id="at the end of the tree"),
    pytest.param([1, 1, 1, 1], [1], r"rank 1 \(host1\) has", id="beside it in the tree"),
]


@pytest.mark.parametrize(("hosts", "missing", "who"), MISSING)
@pytest.mark.parametrize("ordered", [False, True])
@on_ranks("hosts", log_level=5)
def test_all_ranks_read_who_has_not_called_what(rank: Rank, missing: Sequence[int], who: str, ordered: bool) -> None:
    name = None if ordered else "x"
    for _ in range(3):
        rank.barrier(name)  # type: ignore[arg-type]
    text = end_of(rank) if rank.rank in missing else fails(rank, name)
    assert re.match(f"{who} not called barrier '{'call 4' if ordered else 'x'}' {WITHIN}", text), text


@on_ranks([2], [1, 1], log_level=5)
def test_one_that_is_done_in_time_has_no_effect(rank: Rank) -> None:
    for i in range(20):
        rank.barrier(f"x{i % 3}", timeout_ms=30_000)
    rank.barrier("short", timeout_ms=EASY_MS)
    if rank.rank == 0:
        threading.Event().wait(1.3 * EASY_MS / 1000)  # the timeout of what is over passes
    rank.barrier("without")


@on_ranks([2], log_level=5)
def test_the_earliest_of_several_counts(rank: Rank) -> None:
    for name, timeout_ms in (("a", 60_000), ("b", 0), ("c", TIMEOUT_MS), ("d", 30_000)) if rank.rank == 0 else ():
        rank.submit("barrier", name, [], timeout_ms=timeout_ms)
    assert re.match(rf"rank 1 \(host0\) has not called barrier 'c' {WITHIN}", end_of(rank))


NOT_CALLED = {"receive": "send to rank 0, tag 7", "send": "receive from rank 0, tag 7"}


@pytest.mark.parametrize("call", ["send", "receive"])
@on_ranks([3], [1, 2], log_level=5)
def test_a_send_or_receive_that_is_late_ends_the_group_and_names_the_other_rank(rank: Rank, call: str) -> None:
    """Rank 2 has no part in it, and another send is done in time."""
    array = np.zeros(9)
    calls = [(begin, peer) for begin in (rank.send, rank.receive) for peer in range(3) if peer != rank.rank]
    rank.finish(*[begin(np.zeros(9), peer, 1, timeout_ms=TIMEOUT_MS * 50) for begin, peer in calls])
    who = rf"rank 1 \(host\d\) has not called {NOT_CALLED[call]} {WITHIN}"
    if rank.rank > 0:
        assert re.match(who, end_of(rank))
        return
    began = time.monotonic()
    begin = rank.send if call == "send" else rank.receive
    with pytest.raises(TimeoutError, match=f"^{who}"):
        rank.finish(begin(array, 1, 7, timeout_ms=TIMEOUT_MS))
    assert SECONDS - 0.01 <= time.monotonic() - began < LATE_S


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_receive_is_late_behind_the_end_of_the_group_too(leaver: int) -> None:
    with Group([3], log_level=5) as group:
        rank, array = Rank(group.contexts[1]), np.zeros(9)
        pending = rank.receive(array, 2 - leaver, timeout_ms=TIMEOUT_MS)
        anyone = rank.receive(array, None, 3, timeout_ms=60_000)
        group.leave(leaver)
        who = rf"rank {2 - leaver} \(host0\) has not called send to rank 1, tag 0 {WITHIN}"
        for handle in (pending, anyone):
            with pytest.raises(TimeoutError, match=who):
                rank.finish(handle)


STOPPED = """
import os, signal, sys, time
import numpy as np
from ranks import forked

hosts, stopped, where = eval(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rank, pids = forked(hosts, None, log_level=5, tcp=True, stall_warning_ms=0, segment_bytes=1 << 16)
if rank is None:
    last = pids.pop(stopped)
    for pid in pids.values():
        os.waitpid(pid, 0)
    os.kill(last, signal.SIGKILL)
    os.waitpid(last, 0)
    sys.exit(0)
me = rank.rank
array = np.ones(1 << 24, np.float32)
rank.barrier()
if me == stopped and where == "before":
    os.kill(os.getpid(), signal.SIGSTOP)
began = time.monotonic()
try:
    handle = rank.submit("allreduce", "x", [array], reduce_op=1, timeout_ms=1000)
    if me == stopped:
        while rank.context.events()[-1].event not in ("begun", "ended"):
            pass
        os.kill(os.getpid(), signal.SIGSTOP)
    rank.finish(handle)
    os.write(1, f"{me} finished\\n".encode())
except Exception as error:
    took = time.monotonic() - began
    os.write(1, f"{me} {type(error).__name__} {took:.1f} {error}\\n".encode())
os._exit(0)
"""

CASES = [
    *(("[3]", 0), ("[2, 2]", 2), ("[2, 2]", 3)),
    *((str([1] * hosts), stopped) for hosts, stopped in ((4, 0), (8, 7))),  # which others ask for others
]


def lines_of(hosts: str, stopped: int, where: str) -> dict[str, str]:
    """The errors of the other ranks."""
    said = "finished"
    for _ in range(5):  # a rank may come to its stop too late
        said = said if "finished" not in said else run_script(STOPPED, hosts, stopped, where)
    lines = dict(line.split(" ", 1) for line in said.splitlines())
    assert len(lines) == sum(eval(hosts)) - 1
    texts = {}
    for rank, line in lines.items():
        kind, took, texts[rank] = line.split(" ", 2)
        assert kind == "TimeoutError", said
        assert float(took) < LATE_S
    return texts


@pytest.mark.parametrize(("hosts", "stopped"), CASES)
def test_a_rank_that_is_stopped_before_it_calls_is_named(hosts: str, stopped: int) -> None:
    for text in lines_of(hosts, stopped, "before").values():
        assert re.match(rf"rank {stopped} \(host\d\) (has not called|does not answer)", text), text


def test_a_rank_that_is_stopped_in_the_middle_is_named() -> None:
    for hosts, stopped in (("[3]", 1), ("[3]", 0), ("[2, 2]", 3)):
        for text in lines_of(hosts, stopped, "middle").values():
            assert re.match(rf"rank {stopped} \(host\d\) does not answer, and others wait for allreduce 'x'", text), (
                text
            )
