"""Signal handlers that end a call of this process by an exception, once the call is where the test wants it."""

import signal
from collections.abc import Callable
from typing import Any

import pytest


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
        signal.signal(signal.SIGALRM, _pass_over)  # the default would end the process by one that is still under way


def _pass_over(*_: object) -> None:
    pass
