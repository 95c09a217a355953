"""Operations of a process group that are done or in progress, as its methods return them, and their futures."""

from __future__ import annotations

import bisect
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_distributed

from horo.core.completion import wait_a_moment
from horo.core.context import Context
from horo.diagnostics.deadlock import OwnThread
from horo.errors import AbortedError, HoroError, TimeoutError
from horo.torch.compat.torch_private import forgets_works
from horo.torch.engine.operation import count_change

__all__ = ["DONE", "HoroWork", "Pending", "done"]

_NO_TIMEOUT = timedelta(0)
_IDLE_MOST = 2
"""Idle threads for futures: a step of DDP needs so many, again and again."""
_IS_FORGOTTEN = forgets_works()
_HELD_MAX = 64
"""Works that nobody has waited for, at most; C++ of torch has waited for each before it began so many more."""


class _Done(torch_distributed.Work):
    """Of a call that has ended already: there is nothing left to wait for."""

    def __init__(self, outputs: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._outputs = outputs

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
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(self._outputs))
        return future


DONE = _Done()
"""Shared by all calls that wait."""
_done_lately: deque[_Done] = deque(maxlen=_HELD_MAX)


def done(outputs: Sequence[torch.Tensor]) -> _Done:
    """The work of a call that does not wait and has ended already; its future has ``outputs``."""
    work = _Done(outputs)
    if _IS_FORGOTTEN:
        _done_lately.append(work)
    return work


class HoroWork(torch_distributed.Work):
    """An operation in progress. Holds its tensors until it is done. Thread-safe."""

    def __init__(
        self,
        pending: Pending,
        handle: int,
        keep: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        after: Callable[[int], Any] | None,
        *,
        spans: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Args:
        pending: the operations in progress of the group.
        handle: of the core.
        keep: tensors that the core uses until the operation is done.
        outputs: tensors of the caller that have the result in the end.
        after: is called with the handle when the operation has ended well, once: moves the results into ``outputs``.
        spans: of its memory, as ``hold_back`` returns them.
        """
        super().__init__()
        self.handle = handle
        self._pending = pending
        self._keep: Any = keep
        self._outputs = outputs
        self._after = after
        self._error: HoroError | None = None
        self._event: torch.futures.Future[Any] | None = None
        self._source = -1
        self._is_done = False
        self._ending = threading.Lock()
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
            if self.is_completed():
                self.end(error)
            elif within_s > 0 and isinstance(error, AbortedError):
                raise TimeoutError(
                    f"wait({within_s:g} s): the operation is not done; it goes on, and its tensors stay in use"
                ) from None
            else:  # of a signal handler
                raise
        else:
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
        if self._is_done:
            self.settle(future)
        else:
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
            future.set_exception(self._error.with_traceback(None))

    def end(self, error: HoroError | None = None) -> None:
        """Takes the end of the operation: its results to their places, or its error. The first call counts."""
        with self._ending:
            if self._is_done:
                return
            core = self._pending.core
            if error is None:
                try:
                    if self._after is not None:
                        self._source = self._after(self.handle) or 0
                    count_change(self._outputs)
                except HoroError as of_after:
                    error = of_after
            core.release_if_done(self.handle)
            self._error, self._is_done = error, True
            self._keep = self._after = None
            self._pending.works.discard(self)
            self._pending.memory.remove(self.handle, self._spans)

    def give_up(self, error: HoroError) -> None:
        """The group has ended, and the core uses no memory of it any more."""
        with self._ending:
            if not self._is_done:
                self._error, self._is_done = error, True
                self._keep = self._after = None

    def __del__(self) -> None:
        if not self._is_done:
            with contextlib.suppress(Exception):  # at the end of Python, anything may be gone
                self._pending.core.release_or_keep(self.handle, self._keep)


class _Memory:
    """The memory of operations in progress: no two may share any, since the core may do them at once. Thread-safe."""

    def __init__(self, core: Context) -> None:
        self._core = core
        self._spans: list[tuple[int, int, int]] = []
        """Begin, end and handle of each part, by their place; none overlap."""
        self._lock = threading.Lock()

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
                    if self._core.in_progress(found[2]):  # of a signal handler
                        raise
                self.remove(found[2], [found[:2]])
        return spans

    def _find(self, begin: int, end: int) -> tuple[int, int, int] | None:
        with self._lock:
            index = bisect.bisect_left(self._spans, (end,)) - 1
            return self._spans[index] if index >= 0 and self._spans[index][1] > begin else None

    def add(self, handle: int, spans: Sequence[tuple[int, int]]) -> None:
        """The operation is in progress. If nobody takes its end, ``hold_back`` finds that out."""
        with self._lock:
            for begin, end in spans:
                bisect.insort(self._spans, (begin, end, handle))

    def remove(self, handle: int, spans: Sequence[tuple[int, int]]) -> None:
        """The operation is done."""
        with self._lock:
            for begin, end in spans:
                index = bisect.bisect_left(self._spans, (begin, end, handle))
                if self._spans[index : index + 1] == [(begin, end, handle)]:
                    del self._spans[index]


class Pending:
    """The operations in progress of one group, and the futures that are to be completed."""

    def __init__(self, core: Context) -> None:
        self.core = core
        self.works: weakref.WeakSet[HoroWork] = weakref.WeakSet()
        self.memory = _Memory(core)
        self._held: dict[HoroWork, None] = {}
        """In the order of their beginnings: works that C++ may have, where torch does not keep them for it."""
        self.futures: deque[tuple[HoroWork, torch.futures.Future[Any]]] = deque()
        self.is_awaited = False
        """A thread is in the core for them, or on its way."""
        self._is_stopping = False
        with _threads.changed:
            _threads.groups += 1

    def hold(self, work: HoroWork) -> None:
        """Keeps a work until it was waited for or has a future, or many others have begun."""
        with _threads.changed:
            self._held[work] = None
            if len(self._held) > _HELD_MAX:
                del self._held[next(iter(self._held))]

    def let_go(self, work: HoroWork) -> None:
        """Ends ``hold``."""
        with _threads.changed:
            self._held.pop(work, None)

    def complete_later(self, work: HoroWork, future: torch.futures.Future[Any]) -> None:
        """Has a thread complete ``future`` when ``work`` is done."""
        with _threads.changed:
            if not self._is_stopping:
                self.futures.append((work, future))
                _threads.await_for(self)
                return
        work.settle(future)

    def complete_first(self) -> None:
        """Sleeps until an operation is done, and completes its future; those of others that are done, too."""
        done: list[tuple[HoroWork, torch.futures.Future[Any]]] = []
        while not done and not self._is_stopping:
            with _threads.changed:
                waited = list(self.futures)
            if not any(work.is_completed() for work, _ in waited):
                wait_a_moment(self.core, [work.handle for work, _ in waited])
            done = [pair for pair in waited if pair[0].is_completed()]
        for work, _ in done:
            work.exception()  # its results come to their places
        with _threads.changed:
            for pair in done:
                self.futures.remove(pair)
            self.is_awaited = False
            if not self._is_stopping:
                _threads.await_for(self)
            _threads.changed.notify_all()
        for work, future in done:
            work.settle(future)

    def stop(self) -> None:
        """Returns when no thread is in the core. Futures that are not complete wait for ``settle_all``."""
        with _threads.changed:
            self._is_stopping = True
            while self.is_awaited:
                _threads.changed.wait()
            _threads.groups -= 1
            _threads.changed.notify_all()

    def give_up(self, error: HoroError) -> None:
        """Ends what is left with ``error``, when the context is gone."""
        for work in list(self.works):
            work.give_up(error)
        self.settle_all()

    def settle_all(self) -> None:
        """Completes the futures that are left, whose operations have ended."""
        while self.futures:
            work, future = self.futures.popleft()
            work.settle(future)


class _Threads:
    """The threads of this process that complete futures of all groups.

    For each group that has futures, one thread at a time sleeps in the core. Completing a future runs what the program
    has put behind it with ``then``, which may wait for other futures: another thread sleeps in the core meanwhile.
    There are as many threads as are needed at once, a few idle ones, none before the first future or without a group.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.groups = 0
        self._wanted: deque[Pending] = deque()
        """Groups for which a thread is to be in the core, and is not yet."""
        self._idle = 0

    def await_for(self, pending: Pending) -> None:
        """Sends a thread to the core for futures, unless it has one there; the caller has ``changed``."""
        if pending.futures and not pending.is_awaited:
            pending.is_awaited = True
            self._wanted.append(pending)
            if self._idle >= len(self._wanted):
                self.changed.notify_all()
            else:
                OwnThread(target=self._complete, name="horo futures", daemon=True).start()

    def _complete(self) -> None:
        while True:
            with self.changed:
                self._idle += 1
                while not self._wanted and self.groups and self._idle <= _IDLE_MOST:
                    self.changed.wait()
                self._idle -= 1
                if not self._wanted:
                    return
                pending = self._wanted.popleft()
            pending.complete_first()
            del pending  # an idle thread keeps no group


_threads = _Threads()
os.register_at_fork(after_in_child=_threads.__init__)  # type: ignore[misc]  # they are the parent's
