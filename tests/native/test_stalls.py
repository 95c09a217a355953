"""Ranks that wait for what does not come: reports and the end of a stall, requests with a timeout, and deadlocks.

Each names the operation, and who has not called it; no rank that may go on is taken for one that waits.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fabric import make_team_links
from ranks import Group, Rank, Written, on_ranks, recorded_stderr, run_ranks, run_script, wait_for

from horo.core import context as _core
from horo.errors import DeadlockError, StalledError, TimeoutError


@on_ranks([3], stall_warning_ms=100)
def test_a_rank_that_waits_in_two_process_sets_calls_the_leaders_of_both(rank: Rank, written: Written) -> None:
    """Leaders that wait for nothing, under one name: the report of one set does not stand for the other's."""
    reports = [
        re.compile(r"horo \[0\] warning: .*:\n  ranks 0, 1 \(host0\) have not submitted 'late'"),
        re.compile(r"horo \[1\] warning: .*:\n  rank 1 \(host0\) has not submitted 'late'"),
    ]
    team = rank.context.add_team([1, 2])
    handles = []
    if rank.rank == 2:
        handles.append(rank.submit("barrier", "late", []))
        wait_for(lambda: reports[0].search(written()) is not None)  # rank 1 has gone to sleep by then
        handles.append(rank.submit("barrier", "late", [], team=team))
    else:
        wait_for(lambda: all(report.search(written()) is not None for report in reports))
        rank.barrier("late")
        if rank.rank == 1:
            rank.barrier("late", team=team)
    rank.finish(*handles)


@pytest.mark.parametrize(
    ("hosts", "zero", "one"),
    [
        ([2], "rank 0 (host0) has submitted", "rank 1 (host0) has submitted"),
        ([3], "ranks 0, 2 (host0) have submitted", "rank 1 (host0) has submitted"),
        ([1, 1], "rank 0 (host0) has submitted", "the ranks led by rank 1 (host1) have all submitted"),
    ],
    ids=str,
)
@on_ranks("hosts", stall_warning_ms=300)
def test_a_stall_report_says_of_each_rank_what_it_has_submitted(
    rank: Rank, zero: str, one: str, written: Written
) -> None:
    lines = {f"{zero} 'x' and not 'y'", f"{one} 'y' and not 'x'"}
    own, other = ("y", "x") if rank.rank == 1 else ("x", "y")
    handle = rank.submit("barrier", own, [])
    if rank.rank == 0:
        wait_for(lambda: lines <= {each.strip() for each in written().splitlines()})
        rank.mark("reported")
    rank.await_mark("reported")
    rank.barrier(other)
    rank.finish(handle)


def test_who_is_waited_for_in_the_middle_in_a_process_set_is_named_by_its_rank() -> None:
    """Data links of the set lead nowhere, so that its two members wait for each other."""
    links = make_team_links([0, 1, 2], [1, 2])
    nowhere = [socket.socketpair() for _ in links]
    for (end, _), (rank, fds) in zip(nowhere, links.items(), strict=True):
        os.dup2(end.fileno(), fds["data_fds"][2 - rank], inheritable=False)

    def body(rank: Rank) -> None:
        team = rank.context.add_team([1, 2], **links.get(rank.rank, {}))
        if rank.rank == 0:
            wait_for(lambda: rank.context.health() is not None)
            return
        with pytest.raises(StalledError):
            rank.allreduce(np.ones(100_000), team=team)

    with recorded_stderr() as written:
        run_ranks(body, [1, 1, 1], stall_warning_ms=100, stall_shutdown_ms=2000)
        text = written()
    for ends in nowhere:
        for end in ends:
            end.close()
    late = set(re.findall(r"waiting in process set 1 \(ranks 1, 2\) for (.*) in the middle of an operation", text))
    assert late == {"rank 1 (host1)", "rank 2 (host2)"}, text


@on_ranks([3], [1, 2], stall_warning_ms=100)
def test_a_send_or_receive_that_waits_is_reported_with_its_other_rank(
    rank: Rank, hosts: list[int], written: Written
) -> None:
    who = f"rank 1 (host{len(hosts) - 1}) has not called"
    expected = [f"{who} send to rank 0, tag 7", f"{who} receive from rank 0, tag 8"]
    expected.append("no rank has called send to rank 0, tag 9")
    arrays = [np.zeros(9) for _ in range(3)]
    if rank.rank == 0:
        rank.finish(rank.receive(arrays[0], 1, 7), rank.send(arrays[1], 1, 8), rank.receive(arrays[2], None, 9))
    elif rank.rank == 1:
        wait_for(lambda: all(f"\n  {line}" in written() for line in expected))
        rank.finish(rank.send(arrays[0], 0, 7), rank.receive(arrays[1], 0, 8), rank.send(arrays[2], 0, 9))


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


LAYOUTS = [[2], [3], [1, 1], [2, 2], [1, 1, 1], [1, 2, 1, 1]]


class Watch:
    """Counts how often each rank has told its core what its threads wait for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reports: dict[int, int] = {}
        report = _core.Context._report_blocked

        def counted(context: _core.Context) -> None:
            report(context)
            self.reports[context.rank] = self.reports.get(context.rank, 0) + 1

        monkeypatch.setattr(_core.Context, "_report_blocked", counted)

    def await_more(self, rank: int, count: int) -> None:
        """Until so many more reports of a rank."""
        wanted = self.reports.get(rank, 0) + count
        wait_for(lambda: self.reports.get(rank, 0) >= wanted, timeout_s=60)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


@on_ranks(*LAYOUTS)
def test_all_ranks_are_told_who_waits_for_what(rank: Rank) -> None:
    rank.barrier("before")
    with pytest.raises(DeadlockError) as error:
        rank.allreduce(np.ones(3), "late" if rank.rank == 1 else "early")
    with pytest.raises(DeadlockError):
        rank.barrier("after")
    place = r"\(ranks\.py:\d+\)"
    size, text = rank.size, str(error.value)
    early = "rank 0 waits" if size == 2 else rf"ranks 0, 2{'' if size == 3 else f'-{size - 1}'} wait"
    question = r"has a rank fewer batches, or has it skipped a backward\(\) or step\(\)\?"
    assert re.fullmatch(rf"{early} for 'early' {place}, rank 1 for 'late' {place}; {question}", text), text
    assert rank.is_common("text", text)


@on_ranks([2], [1, 1])
def test_ranks_that_wait_in_different_teams_are_told(rank: Rank) -> None:
    teams = [rank.add_team([0, 1]) for _ in range(2)]
    told = r"rank 0 waits for 'same' in process set 1 \(ranks 0, 1\) .*, rank 1 for 'same' in process set 2"
    with pytest.raises(DeadlockError, match=told):
        rank.barrier("same", team=teams[rank.rank])


@on_ranks([2], [2, 2], [1, 1, 1])
def test_a_rank_that_computes_is_waited_for(rank: Rank, watch: Watch) -> None:
    """Also by a receive, and where it has submitted something else before."""
    rank.barrier("before")
    array = np.ones(3)
    if rank.rank == 1:
        watch.await_more(0, 5)
        rank.finish(rank.send(array, 0), rank.receive(array, 0))
        handle = rank.submit("barrier", "b", [])
        watch.await_more(0, 4)
        rank.barrier("a")
        rank.finish(handle)
        return
    if rank.rank == 0:
        rank.finish(rank.receive(array, 1), rank.send(array, 1))
    rank.barrier("a")
    rank.barrier("b")


@on_ranks([2], [1, 1], stall_warning_ms=1000)
def test_a_thread_that_may_still_submit_makes_it_a_warning(rank: Rank, written: Written) -> None:
    said = r"rank 0 waits for 'a' .*, rank 1 for 'b' .*; only thread 'Later' of rank 0 may still submit"
    if rank.rank == 1:
        rank.barrier("first")
        rank.barrier("b")
        rank.barrier("a")
        return

    def later() -> None:
        rank.barrier("first")
        rank.mark("is known")
        wait_for(lambda: re.search(said, written()) is not None, 60)
        rank.barrier("b")

    thread = threading.Thread(target=later, name="Later")
    thread.start()
    rank.await_mark("is known")  # else nobody can know that it is to come
    rank.finish(rank.submit("barrier", "a", []))
    thread.join()


@on_ranks([2], [1, 1], stall_warning_ms=500)
def test_ranks_that_only_poll_are_named_by_the_check_for_stalls(rank: Rank, written: Written) -> None:
    """What a thread does between two polls, nobody can know: it may submit what is missing, as it does here."""

    def is_named() -> bool:
        return "waiting for" in (text := written()) and "'a'" in text

    first, second = ("a", "b") if rank.rank == 0 else ("b", "a")
    handle = rank.submit("barrier", first, [])
    wait_for(lambda: rank.context.poll(handle) or is_named(), 60)
    rank.barrier(second)
    rank.finish(handle)
    assert "nothing can finish" not in written()


@on_ranks([2], [1, 1])
def test_a_team_that_comes_between_two_reports_hides_no_deadlock(rank: Rank, watch: Watch) -> None:
    rank.barrier("before")  # so this thread is known to use horo
    with ThreadPoolExecutor() as pool:
        early = pool.submit(rank.barrier, f"early {rank.rank}")
        watch.await_more(rank.rank, 1 + rank.rank)  # the team is there when one rank has reported again, or neither
        team = rank.add_team([0, 1])
        with pytest.raises(DeadlockError):
            rank.barrier(f"late {rank.rank}", team=team)
        with pytest.raises(DeadlockError) as error:
            early.result(60)
    text = str(error.value)
    assert rank.is_common("text", text)
    for r in range(2):
        assert f"'early {r}' (" in text
        assert f"'late {r}' in process set 1 (ranks 0, 1) (" in text


@pytest.mark.parametrize("call", ["receive", "send", "barrier"])
@on_ranks([2], [3], [1, 1])
def test_sends_and_receives_that_never_meet_are_told(rank: Rank, call: str) -> None:
    peer, array = (rank.rank + 1) % rank.size, np.ones(10_000)
    rank.finish(rank.send(array, peer, 4), rank.receive(np.zeros(10_000), None, 4))
    with pytest.raises(DeadlockError) as error:
        if call == "barrier" and rank.rank == 0:
            rank.barrier("all")
        else:
            rank.finish(rank.send(array, peer) if call == "send" else rank.receive(array, peer))
    text = str(error.value)
    assert rank.is_common("text", text)
    advice = {"send": "let one rank receive first", "receive": "does one of the ranks send first"}
    assert advice.get(call, "has a rank fewer batches") in text
    verb = {"send": "send to"}.get(call, "receive from")
    for r in range(rank.size):
        waited = "all" if call == "barrier" and r == 0 else f"{verb} rank {(r + 1) % rank.size}, tag 0"
        assert re.search(rf"rank {r}( waits)? for '{waited}' \(\w+\.py:\d+\)", text), text
