"""One thread that waits for files, signals and timers.

Timers count the time in which this process could run: a job that is stopped as a whole (SIGSTOP, a frozen control
group) and continued later has missed no deadline. A sleep that lasts longer than asked for shows it. The time of
callbacks counts in full: a flood of output on a busy host makes them slow, and must not delay a deadline.
"""

from __future__ import annotations

import heapq
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Loop", "Timer"]

_TICK_S = 1.0
"""The longest sleep while a timer runs: of the time in which this process was stopped, at most so much counts."""
_LATE_S = 2.0
"""A sleep that has lasted so much longer than it should: this process was stopped. A crowded host holds up one that may
run for less, and where that counted as a stop, sleeps of a moment would make hardly any way to a deadline."""


@dataclass(order=True)
class Timer:
    """A call to make later; ``cancel`` forgets it."""

    due_s: float
    order: int
    call: Callable[[], None] | None = field(compare=False)

    def cancel(self) -> None:
        """Forgets the call; harmless when it has been made."""
        self.call = None


class Loop:
    """Calls back for descriptors that are ready, signals and timers.

    All methods but ``wake`` belong to the thread that runs the loop. Signal handlers of the process are the loop's
    while it is open; it must be made in the main thread.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[Timer] = []
        self._timers_made = 0
        self._signals: dict[int, Callable[[int], None]] = {}
        self._before: dict[int, object] = {}
        self._mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._on_wake: Callable[[], None] = _nothing
        self._on_stopped: Callable[[], None] = _nothing
        self._stopped_s = 0.0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
        self._wakeup_before = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def close(self) -> None:
        """Gives the signals back as they were."""
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._wake_write = -1  # a late wake() from another thread must not reach a descriptor of that number

    def watch(
        self, fd: int, *, read: Callable[[], object] | None = None, write: Callable[[], object] | None = None
    ) -> None:
        """Calls ``read`` or ``write`` whenever the descriptor is ready for it; neither: forgets it."""
        mask = (selectors.EVENT_READ if read else 0) | (selectors.EVENT_WRITE if write else 0)

        def ready(events: int) -> None:
            if read and events & selectors.EVENT_READ:
                read()
            elif write and events & selectors.EVENT_WRITE:
                write()

        known = fd in self._selector.get_map()
        if mask and known:
            self._selector.modify(fd, mask, ready)
        elif mask:
            self._selector.register(fd, mask, ready)
        elif known:
            self._selector.unregister(fd)

    def on_signal(self, number: int, call: Callable[[int], None]) -> None:
        """Calls ``call`` with the number when the signal has come.

        A signal that was ignored stays ignored, and a handler of a library, such as a profiler's, stays. One that was
        blocked comes: a mask survives ``exec``, and batch systems and MPIs start programs with theirs.

        Children start with the default action again, because a handler (unlike *ignore*) does not survive ``exec``.
        """
        if signal.getsignal(number) in (signal.SIG_IGN, None) and number != signal.SIGCHLD:
            return
        self._signals[number] = call
        self._before.setdefault(number, signal.signal(number, _nothing_for_signal))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})

    def on_wake(self, call: Callable[[], None]) -> None:
        """Calls ``call`` after ``wake``."""
        self._on_wake = call

    def on_stopped(self, call: Callable[[], None]) -> None:
        """Calls ``call`` when this process runs again after it was stopped, before any timer is due."""
        self._on_stopped = call

    @property
    def now_s(self) -> float:
        """The clock of the timers, in seconds: it stands still while this process is stopped."""
        return time.monotonic() - self._stopped_s

    def stop_process(self) -> None:
        """Stops this process until it gets SIGCONT; that time does not count."""
        began_s = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._not_counted(time.monotonic() - began_s)

    def wake(self) -> None:
        """Makes the loop call, from any thread, the function that ``on_wake`` was given."""
        try:
            os.write(self._wake_write, b"\0")
        except (BlockingIOError, OSError):
            return  # full: it wakes anyway; closed: nobody is left to wake

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Calls ``call`` once, ``delay_s`` seconds from now by ``now_s``."""
        self._timers_made += 1
        timer = Timer(self.now_s + delay_s, self._timers_made, call)
        heapq.heappush(self._timers, timer)
        return timer

    def run_until(self, done: Callable[[], bool]) -> None:
        """Waits and calls back until ``done()`` is true; it is asked after every round."""
        while not done():
            self._round()

    def _round(self) -> None:
        timeout_s = self._timeout_s()
        began_s = time.monotonic()
        ready = self._selector.select(timeout_s)
        woke_s = time.monotonic()
        if timeout_s is not None and woke_s - began_s > timeout_s + _LATE_S:
            self._not_counted(woke_s - began_s - timeout_s)
        for key, events in ready:
            # An earlier call of this round may have closed or changed this descriptor.
            now = self._selector.get_map().get(key.fd)
            if now is not None and now.data is key.data:
                key.data(events)
        # By the clock after the sleep: what is ready by then has its turn before the deadlines.
        woke_s -= self._stopped_s
        while self._timers and self._timers[0].due_s <= woke_s:
            timer = heapq.heappop(self._timers)
            if timer.call is not None:
                timer.call()

    def _timeout_s(self) -> float | None:
        while self._timers and self._timers[0].call is None:
            heapq.heappop(self._timers)
        return min(_TICK_S, max(0.0, self._timers[0].due_s - self.now_s)) if self._timers else None

    def _not_counted(self, stopped_s: float) -> None:
        self._stopped_s += stopped_s
        self._on_stopped()

    def _woken(self, _events: int) -> None:
        try:
            numbers = os.read(self._wake_read, 65536)
        except BlockingIOError:
            return
        for number in dict.fromkeys(numbers):
            if number == 0:
                self._on_wake()
            elif number in self._signals:
                for _ in range(1 if number == signal.SIGCHLD else numbers.count(number)):
                    self._signals[number](number)


def _nothing() -> None:
    return None


def _nothing_for_signal(_number: int, _frame: object) -> None:
    return None
