"""Signal handlers that come to a call of this process, and may end it by an exception, where the test wants it."""

import signal
import sys
from collections.abc import Callable, Collection
from typing import Any

import pytest


class LeftError(Exception):
    """By which a signal handler of a test leaves a call."""


def interrupt(
    call: Callable[[], Any], error: type[BaseException], is_there: Callable[[], bool], every_s: float = 0.05
) -> None:
    """Does ``call()``, which a signal handler must end by ``error``, however slow the machine is.

    The handler raises once ``is_there()``: the call has come to where it may end. It looks every ``every_s``
    seconds, so long that a call that is there is also where it waits.
    """
    has_raised = False

    def handler(*_: object) -> None:
        nonlocal has_raised
        if not has_raised and is_there():
            has_raised = True  # another signal may be under way, and come outside the call
            raise error

    signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(error):
            signal.setitimer(signal.ITIMER_REAL, every_s, every_s)
            call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        # The default would end the process by one that is still under way.
        signal.signal(signal.SIGALRM, lambda *_: None)


def do_at(call: Callable[[], Any], at: int, handler: Callable[[], None], behind: Collection[str] = ()) -> bool:
    """Calls, and does ``handler()`` at the ``at``-th place of horo at which signal handlers may run.

    Python runs them where a function begins and where one of C has returned, which a profiler is told of. ``behind``:
    only places after one of these functions of C has returned, or of Python has begun. Returns whether there are so
    many.
    """
    left = at
    has_begun = not behind

    def look(frame: Any, event: str, what: Any) -> None:
        nonlocal left, has_begun
        name = what.__name__ if event == "c_return" else frame.f_code.co_name if event == "call" else ""
        has_begun |= name in behind
        if has_begun and event in {"call", "c_return"} and "/horo/" in frame.f_code.co_filename:
            left -= 1
            if left < 0:
                sys.setprofile(None)
                handler()

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return left < 0
