"""Several threads wait for one handle: whoever releases it, each gets what has become of the request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from ranks import Rank, on_ranks, run_ranks, wait_for

from horo.core import context as _core
from horo.core.context import ffi, lib
from horo.errors import AbortedError, MismatchError, UsageError

SUM = _core.REDUCE_OPS["sum"]
WAITERS = 6


class Waiters:
    """Threads that are in one call each. They live to the end of the test, so that each has an identity of its own."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.outcomes: list[BaseException | None] = []
        """What each call has raised."""

    def start(self, call: Callable[[], object]) -> None:
        """Starts a thread; returns once it waits in the core, which notes callers when it has found their request."""

        def body() -> None:
            outcome = None
            try:
                call()
            except BaseException as error:
                outcome = error
            self.outcomes.append(outcome)
            assert self._over.wait(60)

        thread = threading.Thread(target=body, daemon=True)
        self._threads.append(thread)
        thread.start()
        wait_for(lambda: thread.ident in self._rank.context.callers())

    def await_all(self) -> None:
        """Waits until all have returned."""
        wait_for(lambda: len(self.outcomes) == len(self._threads))

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)


@contextmanager
def waiters_of(rank: Rank) -> Iterator[Waiters]:
    waiters = Waiters(rank)
    try:
        yield waiters
    finally:
        waiters.end()


@contextmanager
def holding(event: threading.Event) -> Iterator[None]:
    """Sets the event in the end, also after a failure: another rank waits for it."""
    try:
        yield
    finally:
        event.set()


@pytest.mark.parametrize("hosts", [[2], [1, 1]], ids=str)
@pytest.mark.parametrize("way", ["wait", "finish", "wait_any", "release"])
def test_each_waiter_returns_when_the_request_is_done(hosts: list[int], way: str) -> None:
    """And not when the next request is, in whose memory this one was: the other rank submits that later."""
    may_reduce, may_go_on = threading.Event(), threading.Event()

    def body(rank: Rank) -> None:
        array = np.full(4, 1.0 + rank.rank)
        if rank.rank == 1:
            assert may_reduce.wait(60)
            rank.allreduce(array, "a")
            assert may_go_on.wait(60)
            rank.allreduce(array, "b")
            return
        with holding(may_go_on), holding(may_reduce), waiters_of(rank) as waiters:
            handle = rank.submit("allreduce", "a", [array], reduce_op=SUM)
            for _ in range(WAITERS):
                if way == "wait_any":
                    waiters.start(lambda: rank.context.wait_any([handle, handle]))
                else:
                    waiters.start(lambda: rank.context.finish(handle) if way == "finish" else rank.context.wait(handle))
            may_reduce.set()
            if way == "release":
                wait_for(lambda: rank.context.release_if_done(handle))
            else:
                rank.context.finish_or_keep(handle)
            following = rank.submit("allreduce", "b", [np.ones(4)], reduce_op=SUM)
            waiters.await_all()
            assert waiters.outcomes == [None] * WAITERS
            assert array.tolist() == [3.0] * 4
            may_go_on.set()
            rank.finish(following)

    run_ranks(body, hosts)


@pytest.mark.parametrize("hosts", [[2], [1, 1]], ids=str)
def test_each_waiter_gets_the_sentence_of_the_error(hosts: list[int]) -> None:
    may_reduce = threading.Event()

    def body(rank: Rank) -> None:
        if rank.rank == 1:
            assert may_reduce.wait(60)
            with pytest.raises(MismatchError):
                rank.allreduce(np.ones(5), "x")
            return
        with holding(may_reduce), waiters_of(rank) as waiters:
            handle = rank.submit("allreduce", "x", [np.ones(4)], reduce_op=SUM)
            for call in [rank.context.wait, rank.context.finish] * (WAITERS // 2):
                waiters.start(lambda call=call: call(handle))
            may_reduce.set()
            waiters.await_all()
            for outcome in waiters.outcomes:
                assert isinstance(outcome, MismatchError)
                assert "[4]" in str(outcome) and "[5]" in str(outcome)

    run_ranks(body, hosts)


@on_ranks([2])
def test_who_comes_after_the_release_is_told_so(rank: Rank) -> None:
    context = rank.context
    handle = rank.submit("barrier", "b", [])
    context.finish(handle)
    gone = f"Handle {handle} was not created or has been cleared."
    for call in (context.wait, context.finish, context.finish_or_keep, context.release, context.poll):
        with pytest.raises(UsageError, match=gone) as raised:
            call(handle)
        assert type(raised.value) is UsageError
        assert raised.value._is_released
    native = context._context
    assert lib.horo_wait(native, handle, 0, ffi.NULL, 0) == lib.HORO_ERR_HANDLE
    assert lib.horo_finish(native, handle, 0, ffi.NULL, 0) == lib.HORO_ERR_HANDLE
    assert lib.horo_release(native, handle) == lib.HORO_ERR_HANDLE
    context.wait_any([handle, handle])


@pytest.mark.parametrize("hosts", [[2], [1, 1]], ids=str)
def test_an_end_of_the_context_lets_those_that_wait_return(hosts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them drives. The request is never submitted by the other rank."""
    waits = threading.Event()
    monkeypatch.setattr(_core, "_SIGNAL_CHECK_MS", 60_000)  # none calls again after the end

    def body(rank: Rank) -> None:
        if rank.rank == 1:
            assert waits.wait(60)
            return
        with holding(waits), waiters_of(rank) as waiters:
            handle = rank.submit("allreduce", "x", [np.ones(4)], reduce_op=SUM)
            for number in range(WAITERS):
                waiters.start(
                    (lambda: rank.context.wait_any([handle, handle]))
                    if number == 0
                    else (lambda: rank.context.wait(handle))
                )
            rank.context.destroy()
            waiters.await_all()
            ends = [type(outcome) for outcome in waiters.outcomes if outcome is not None]
            assert ends == [AbortedError] * (WAITERS - 1)

    run_ranks(body, hosts)
