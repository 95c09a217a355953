"""Operations of a process group that are done or in progress, as its methods return them, and their futures."""

from __future__ import annotations

import bisect
import contextlib
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as torch_distributed

from horo.core.completion import wait_a_moment
from horo.core.context import Context
from horo.diagnostics.deadlock import OwnThread
from horo.errors import AbortedError, HoroError, TimeoutError
from horo.torch.compat.torch_private import fail_future, forgets_works
from horo.torch.engine.operation import count_change

__all__ = ["DONE", "HoroWork", "Pending"]

_NO_TIMEOUT = timedelta(0)
_IDLE_MOST = 2
"""Idle threads for futures: a step of DDP needs so many, again and again."""
_IS_FORGOTTEN = forgets_works()
_MOMENT_S = 0.05
_HELD_MAX = 64
"""Works that nobody has waited for, at most; C++ of torch has waited for each before it began so many more."""


class _Done(torch_distributed.Work):
    """Of a call that has waited: there is nothing left to wait for."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True

    def synchronize(self) -> None:
        """Does nothing."""

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return []

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([])
        return future


DONE = _Done()
"""Shared by all calls that wait."""


class HoroWork(torch_distributed.Work):
    """An operation in progress. Holds its tensors until it is done. Thread-safe.

    A signal handler may come anywhere, to wait for the same work or to raise. So what ends the work may be done again
    until ``_is_done``, which comes before the handle is released.
    """

    handle = 0
    """Of the core."""

    def __init__(
        self,
        pending: Pending,
        handle: int,
        keep: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        after: Callable[[int], int | HoroError | None] | None,
        *,
        spans: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Args:
        pending: the operations in progress of the group.
        handle: of the core.
        keep: tensors that the core uses until the operation is done.
        outputs: tensors of the caller that have the result in the end.
        after: is called with the handle when the operation has ended well: moves the results into ``outputs``, and does
            the same if it is called again. Returns the rank that a receive has received from, or the error.
        spans: of its memory, as ``hold_back`` returns them.
        """
        super().__init__()
        self._pending = pending
        pending.in_use[handle] = keep
        self.handle = handle
        self._outputs = outputs
        self._after = after
        self._error: HoroError | None = None
        self._event: torch.futures.Future[Any] | None = None
        self._source = -1
        self._is_done = False
        self._ending = threading.RLock()
        self._spans = spans
        pending.works.add(self)
        if _IS_FORGOTTEN:
            pending.hold(self)
        pending.memory.add(handle, spans)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Blocks, with the GIL released, until the operation is done. Raises its error, or ``TimeoutError``."""
        if not self._is_done:
            self._await_end(timeout.total_seconds())
        if _IS_FORGOTTEN:
            self._pending.let_go(self)
        if self._event is not None:
            self._event.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)
        return True

    def _await_end(self, within_s: float = 0) -> None:
        try:
            if within_s > 0:
                self._pending.core.wait(self.handle, within_s)
            else:
                self._pending.core.wait(self.handle)
        except HoroError as error:
            core, is_late = self._pending.core, within_s > 0 and isinstance(error, AbortedError)
            if self.is_completed() and not core.succeeded(self.handle):
                self.end(error)
            elif is_late and not self.is_completed():
                raise TimeoutError(
                    f"wait({within_s:g} s): the operation is not done; it goes on, and its tensors stay in use"
                ) from None
            elif not is_late:  # of a signal handler
                raise
        self.end()

    def record_until(self, event: torch.futures.Future[Any]) -> None:
        """Has waits of the program return after ``event``, which a future of this operation completes.

        A profiler that is turned off then has the whole event.
        """
        self._event = event

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is done, well or not; never blocks."""
        return self._is_done or not self._pending.core.in_progress(self.handle)

    def is_success(self) -> bool:
        """Whether it has ended well; never blocks."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> HoroError | None:
        """The error with which it has ended; None: it has not, or well."""
        if not self._is_done and self.is_completed():
            self._await_end()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors with the result; blocks as ``wait``."""
        self.wait()
        return list(self._outputs)

    def source_rank(self) -> int:
        """Of a receive from any rank: whose message it was."""
        self.wait()
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future with the list of tensors that have the result."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        if not self._is_done and self.is_completed():
            self._await_end()  # by this thread: it may be a signal handler's, inside the end of this work
        self._pending.complete_later(self, future)
        if _IS_FORGOTTEN:
            self._pending.let_go(self)
        return future

    def settle(self, future: torch.futures.Future[Any]) -> None:
        """Completes a future of this operation, which has ended."""
        if not self._is_done:
            self._await_end()
        if self._error is None:
            future.set_result(list(self._outputs))
        else:  # without its frames, which refer to the future: no collector sees that
            fail_future(future, self._error.with_traceback(None))

    def end(self, error: HoroError | None = None) -> None:
        """Takes the end of the operation: its results to their places, or its error. The first call counts."""
        with self._ending:
            if self._is_done:
                return
            if error is None:
                found = None if (after := self._after) is None else after(self.handle)
                if isinstance(found, HoroError):
                    error = found
                elif found is not None and found >= 0:  # the handle is there
                    self._source = found
                count_change(self._outputs)
            if not self._is_done:  # by a signal handler meanwhile
                self._error, self._is_done = error, True
                self._pending.works.discard(self)
                self._pending.memory.remove(self.handle, self._spans)
                self._pending.core.release_if_done(self.handle)
                self._pending.in_use.pop(self.handle, None)
                self._after = None

    def end_soon(self) -> bool:
        """As ``end``, of one that has ended. False: a thread is at it, whose signal handler may wait for the caller."""
        if self._is_done:
            return True
        if not self._ending.acquire(timeout=_MOMENT_S):
            return False
        try:
            self.exception()
        finally:
            self._ending.release()
        return True

    def give_up(self, error: HoroError) -> None:
        """The group has ended, and the core uses no memory of it any more."""
        with self._ending:
            if not self._is_done:
                self._error, self._is_done = error, True
                self._pending.in_use.pop(self.handle, None)
                self._after = None

    def __del__(self) -> None:
        if self.handle and self.handle in self._pending.in_use:
            with contextlib.suppress(Exception):  # at the end of Python, anything may be gone
                self._pending.core.release_or_keep(self.handle, self._pending.in_use[self.handle])
                self._pending.in_use.pop(self.handle, None)


class _Memory:
    """The memory of operations in progress: no two may share any, since the core may do them at once. Thread-safe.

    No lock: a signal handler may come here again. Each change of the list is one call of C, which nothing interrupts.
    """

    def __init__(self, core: Context) -> None:
        self._core = core
        self._spans: list[tuple[int, int, int]] = []
        """Begin, end and handle of each part, by their place; none overlap."""

    def __bool__(self) -> bool:
        return bool(self._spans)

    def hold_back(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
        """Waits for operations that use some of this memory. Returns where it begins and ends, for ``add``."""
        spans: list[tuple[int, int]] = []
        for begin, end in sorted({(each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors}):
            if spans and begin < spans[-1][1]:
                spans[-1] = spans[-1][0], max(end, spans[-1][1])
            elif begin < end:
                spans.append((begin, end))
        for begin, end in spans:
            while (found := self._find(begin, end)) is not None:
                try:
                    self._core.wait(found[2])
                except HoroError:  # its own wait raises it; or it has been released
                    if self._core.in_progress(found[2]) or self._core.succeeded(found[2]):  # of a signal handler
                        raise
                self.remove(found[2], [found[:2]])
        return spans

    def _find(self, begin: int, end: int) -> tuple[int, int, int] | None:
        spans = tuple(self._spans)
        index = bisect.bisect_left(spans, (end,)) - 1
        return spans[index] if index >= 0 and spans[index][1] > begin else None

    def add(self, handle: int, spans: Sequence[tuple[int, int]]) -> None:
        """The operation is in progress. If nobody takes its end, ``hold_back`` finds that out."""
        for begin, end in spans:
            bisect.insort(self._spans, (begin, end, handle))

    def remove(self, handle: int, spans: Sequence[tuple[int, int]]) -> None:
        """The operation is done."""
        for begin, end in spans:
            with contextlib.suppress(ValueError):
                self._spans.remove((begin, end, handle))


class Pending:
    """The operations in progress of one group, and the futures that are to be completed."""

    def __init__(self, core: Context) -> None:
        self.core = core
        self.works: weakref.WeakSet[HoroWork] = weakref.WeakSet()
        self.memory = _Memory(core)
        self.in_use: dict[int, Sequence[torch.Tensor]] = {}
        """By handle: what the core may use. A handler that raises in ``HoroWork.__del__`` does not let it go."""
        self._held: OrderedDict[HoroWork, None] = OrderedDict()
        """In the order of their beginnings: works that C++ may have, where torch does not keep them for it."""
        self.futures: deque[tuple[HoroWork, torch.futures.Future[Any]]] = deque()
        self.is_awaited = False
        """A thread is in the core for them."""
        self._is_stopping = False
        with _threads.changed:
            _threads.groups += 1

    def hold(self, work: HoroWork) -> None:
        """Keeps a work until it was waited for or has a future, or many others have begun."""
        self._held[work] = None
        if len(self._held) > _HELD_MAX:
            self._held.popitem(last=False)

    def let_go(self, work: HoroWork) -> None:
        """Ends ``hold``."""
        self._held.pop(work, None)

    def complete_later(self, work: HoroWork, future: torch.futures.Future[Any]) -> None:
        """Has a thread complete ``future`` when ``work`` is done."""
        self.futures.append((work, future))
        if self._is_stopping:
            self.settle_all()
        elif not self.is_awaited:  # else that thread asks for the next one, behind ``is_awaited``
            _threads.await_for(self)

    def begin_waiting(self) -> bool:
        """For a thread that has ``changed``: whether it is to call ``complete_first``."""
        if not self.futures or self.is_awaited or self._is_stopping:
            return False
        self.is_awaited = True
        return True

    def complete_first(self) -> None:
        """Sleeps until an operation is done, and completes its future; those of others that are done, too."""
        done: list[tuple[HoroWork, torch.futures.Future[Any]]] = []
        while not done and not self._is_stopping:
            waited = list(self.futures)
            if not any(work.is_completed() for work, _ in waited):
                wait_a_moment(self.core, [work.handle for work, _ in waited])
            done = [pair for pair in waited if pair[0].is_completed() and pair[0].end_soon()]
        for pair in done:
            self.futures.remove(pair)
        with _threads.changed:
            self.is_awaited = False
            _threads.changed.notify_all()
        if self.futures and not self._is_stopping:
            _threads.await_for(self)
        for work, future in done:
            work.settle(future)

    def stop(self) -> None:
        """Returns when no thread is in the core. Futures that are not complete wait for ``settle_all``."""
        with _threads.changed:
            self._is_stopping = True
            while self.is_awaited:
                _threads.changed.wait()
            _threads.groups -= 1
        _threads.end_idle()

    def give_up(self, error: HoroError) -> None:
        """Ends what is left with ``error``, when the context is gone."""
        for work in list(self.works):
            work.give_up(error)
        self.settle_all()

    def settle_all(self) -> None:
        """Completes the futures that are left, whose operations have ended."""
        while True:
            try:
                work, future = self.futures.popleft()
            except IndexError:
                return
            work.settle(future)


class _Threads:
    """The threads of this process that complete futures of all groups.

    For each group that has futures, one thread at a time sleeps in the core. Completing a future runs what the program
    has put behind it with ``then``, which may wait for other futures: another thread sleeps in the core meanwhile.
    There are as many threads as are needed at once, a few idle ones, none before the first future or without a group.

    A signal handler may wait for a future wherever it comes. So whoever asks for a thread holds no lock.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.groups = 0
        self._wanted: SimpleQueue[Pending | None] = SimpleQueue()
        """Groups for which a thread is to be in the core, some more than once. None: a thread is to look around."""
        self._idle = 0
        self._newest_is_there = threading.Event()
        """Of the thread that was started last: it takes from the queue."""
        self._newest_is_there.set()

    def await_for(self, pending: Pending) -> None:
        """Sends a thread to the core for futures."""
        self._wanted.put(pending)
        self._start()

    def end_idle(self) -> None:
        """Lets idle threads look whether there is still a group."""
        if self._idle:
            self._wanted.put(None)

    def _start(self) -> None:
        """After each change of the queue: a thread, where there are too few, unless another is on its way."""
        if self._wanted.qsize() > self._idle and self._newest_is_there.is_set():
            is_there = threading.Event()
            OwnThread(target=self._complete, args=(is_there,), name="horo futures", daemon=True).start()
            self._newest_is_there = is_there  # behind the start, which a signal handler may prevent

    def _complete(self, is_there: threading.Event) -> None:
        with self.changed:
            self._idle += 1
            is_there.set()
        while True:
            pending = self._wanted.get()
            with self.changed:
                self._idle -= 1
                takes = pending is not None and pending.begin_waiting()
            self._start()
            if pending is not None and takes:
                pending.complete_first()
            del pending  # an idle thread keeps no group
            with self.changed:
                if self._wanted.empty() and (not self.groups or self._idle >= _IDLE_MOST):
                    break
                self._idle += 1
        if not self.groups:
            self.end_idle()


_threads = _Threads()
os.register_at_fork(after_in_child=_threads.__init__)  # type: ignore[misc]  # they are the parent's
