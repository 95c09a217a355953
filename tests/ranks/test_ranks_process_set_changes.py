"""Process sets that come and go: what was begun in one, copies, threads, and calls that an exception has left."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupts import interrupt
from jobs import DEADLINE_S, wait_until
from rank_pool import RankPool, on, on_own

import horo.torch as hvd
from horo.core.signal_safe_call import ThreadCall
from horo.errors import AbortedError, DeadlockError, UsageError
from horo.torch.engine import runtime as _runtime


class _LeftError(Exception):
    pass


def leave(call: Callable[[], Any]) -> None:
    """Does a call that waits for other ranks, and leaves the wait by an exception of a signal handler."""
    interrupt(call, _LeftError, lambda: bool(_runtime.current().active_calls), 0.01)


@on("three")
def test_a_backward_after_the_removal_of_its_set_is_refused() -> None:
    """Also when another set has the number by then."""
    for ranks in ([0, 1, 2][: hvd.size() - 1], [1, 2]):
        first = hvd.add_process_set(ranks)
        results = []
        if first.included():
            given = torch.full((3, 2), 1.0, requires_grad=True)
            results = [
                hvd.allreduce(given, op=hvd.Sum, process_set=first),
                hvd.grouped_allreduce([given, given], process_set=first)[1],
                hvd.allreduce(given, op=hvd.Max, process_set=first),
                hvd.allgather(given, process_set=first),
                hvd.broadcast(given, ranks[0], process_set=first),
            ]
        hvd.remove_process_set(first)
        for _ in range(2):
            for result in results:
                with pytest.raises(UsageError, match="process set 1 has been removed"):
                    result.sum().backward(retain_graph=True)
            second = hvd.add_process_set([0, 2])
            assert second.process_set_id == 1
            for result in results:
                with pytest.raises(UsageError, match="process set 1 has been removed"):
                    result.sum().backward(retain_graph=True)
            hvd.remove_process_set(second)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3


@on("three")
def test_a_copy_is_the_set_itself_and_a_pickled_one_is_not_registered() -> None:
    members = hvd.add_process_set([0, 1])
    for made in (copy.copy(members), copy.deepcopy(members), copy.deepcopy({"of": members})["of"]):
        assert made is members
    again = pickle.loads(pickle.dumps(members))
    assert (again.ranks, again.process_set_id, members.process_set_id) == ([0, 1], None, 1)
    if members.included():
        with pytest.raises(UsageError, match="has not been registered"):
            hvd.barrier(process_set=again)
    for made in (copy.copy, copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))):
        assert made(hvd.global_process_set) is hvd.global_process_set
    hvd.remove_process_set(members)
    assert hvd.add_process_set(again) is again
    assert (again.process_set_id, members.process_set_id) == (1, None)
    assert not hvd.remove_process_set(members)
    assert hvd.remove_process_set(again)


@on("three")
def test_threads_that_add_and_remove_lose_no_set() -> None:
    """One thread removes the set whose number the set of another gets."""
    for _ in range(8):
        first = hvd.add_process_set([0, 1])
        removal = threading.Thread(target=hvd.remove_process_set, args=(first,))
        removal.start()
        wait_until(lambda first=first: _runtime.current().active_calls or first.process_set_id is None, "it waits")
        second = hvd.add_process_set([1, 2])
        removal.join(DEADLINE_S)
        assert not removal.is_alive()
        assert (first.process_set_id, second.process_set_id) == (None, 1)
        if second.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=second).item() == 2
        with pytest.raises(UsageError, match="a duplicate process set"):
            hvd.add_process_set([2, 1])
        assert hvd.remove_process_set(second)


@on("three")
def test_a_call_that_an_exception_has_left_goes_on() -> None:
    for turn in range(6):
        late = turn % 3
        members = hvd.ProcessSet([0, 1] if turn < 3 else [1, 2])
        if hvd.rank() == late:
            hvd.barrier()
            hvd.add_process_set(members)
        else:
            leave(lambda members=members: hvd.add_process_set(members))
            assert members.process_set_id is None
            hvd.barrier()
            assert hvd.add_process_set(members) is members
        assert members.process_set_id == 1
        if members.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=members).item() == 2
        hvd.barrier()
        if hvd.rank() == late:
            hvd.barrier()
            assert hvd.remove_process_set(members)
        else:
            leave(lambda members=members: hvd.remove_process_set(members))
            assert members.process_set_id == 1
            hvd.barrier()
            assert not hvd.remove_process_set(members)
        assert members.process_set_id is None
    other = hvd.add_process_set([0, 2])
    assert other.process_set_id == 1
    hvd.remove_process_set(other)


@on("three")
def test_a_call_that_an_exception_has_left_at_its_end_has_added_the_set() -> None:
    members = hvd.ProcessSet([0, 1])

    def interrupted(call: ThreadCall) -> None:
        raise _LeftError

    with pytest.MonkeyPatch.context() as patch:
        if hvd.rank() == 1:
            patch.setattr(ThreadCall, "result", interrupted)
            with pytest.raises(_LeftError):
                hvd.add_process_set(members)
        else:
            hvd.add_process_set(members)
    if hvd.rank() == 1:
        assert hvd.add_process_set(members) is members
    assert members.process_set_id == 1
    with pytest.raises(UsageError, match="a duplicate process set"):
        hvd.add_process_set([0, 1])
    hvd.remove_process_set(members)


def _leave_and_start_again() -> None:
    for _ in range(2):
        members = hvd.ProcessSet([0])
        if hvd.rank() == 0:
            leave(lambda members=members: hvd.add_process_set(members))
            hvd.shutdown()
        else:
            with pytest.raises(AbortedError):
                hvd.allreduce(torch.ones(1))
            hvd.shutdown()
        assert members.process_set_id is None
        hvd.init()
        hvd.remove_process_set(hvd.add_process_set(members))
    hvd.shutdown()


@pytest.mark.parametrize("ranks_per_host", [2, 1])
def test_a_job_ends_though_an_exception_has_left_a_change(ranks_per_host: int) -> None:
    with RankPool(2, ranks_per_host=ranks_per_host) as pool:
        pool.run(_leave_and_start_again)


@on_own(2, HORO_DEADLOCK_TIME_SECONDS="0.5")
def test_a_thread_that_waits_for_its_turn_counts_as_waiting() -> None:
    """Rank 0 adds in one thread and then in another, rank 1 waits for something else: nobody can go on."""
    others = []
    if hvd.rank() == 0:
        for ranks in ([0], [1]):
            others.append(threading.Thread(target=_swallow, args=(ranks,)))
            others[-1].start()
    with pytest.raises(DeadlockError) as error:
        hvd.allreduce(torch.ones(1), name=f"of {hvd.rank()}")
    for thread in others:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    for told in ("'add_process_set'", "'allreduce.of 0'"):
        assert f"{told} (test_ranks_process_set_changes.py:" in str(error.value)


def _swallow(ranks: list[int]) -> None:
    with pytest.raises((DeadlockError, AbortedError)):
        hvd.add_process_set(ranks)


class Communicator:
    """As far as a process set needs one of mpi4py: the ranks of the job that have the same color."""

    def __init__(self, color: int | None) -> None:
        colors = hvd.allgather_object(color)
        self._ranks = [rank for rank, other in enumerate(colors) if other == color and color is not None]

    def __bool__(self) -> bool:
        return bool(self._ranks)  # MPI.COMM_NULL is false

    def Get_rank(self) -> int:
        return self._ranks.index(hvd.rank())

    def allgather(self, value: int) -> list[int]:
        assert value == hvd.rank()
        return self._ranks[::-1]


@on("three")
def test_communicators_of_a_split_are_registered_and_removed_together() -> None:
    comm = Communicator(hvd.rank() % 2)
    own = hvd.ProcessSet(comm)
    assert (own.ranks, own.process_set_id) == (None, None)
    for _ in range(2):
        assert hvd.add_process_set(own) is own
        assert own.ranks == ([0, 2] if hvd.rank() % 2 == 0 else [1])
        assert own.process_set_id == 1 + hvd.rank() % 2
        assert str(own) == f"ProcessSet(process_set_id={own.process_set_id}, ranks={own.ranks}, mpi_comm={comm})"
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=own).item() == len(own.ranks or [])
        with pytest.raises(UsageError, match="a duplicate process set"):
            hvd.add_process_set([0, 2])
        assert hvd.remove_process_set(own)
        assert own.process_set_id is None


@on("three")
def test_a_process_that_is_in_no_communicator_takes_part_in_the_change() -> None:
    pair = hvd.add_process_set(hvd.ProcessSet(Communicator(0 if hvd.rank() < 2 else None)))
    assert (pair.ranks, pair.included()) == ([0, 1], hvd.rank() < 2)
    if pair.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2
    assert hvd.remove_process_set(pair)
    hvd.shutdown()
    hvd.init()
    split = hvd.ProcessSet(Communicator(hvd.rank() // 2))
    hvd.shutdown()
    hvd.init(process_sets=[split])
    assert split.ranks == ([0, 1] if hvd.rank() < 2 else [2])
    assert hvd.remove_process_set(split)
