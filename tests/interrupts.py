"""Signal handlers that end a call of this process by an exception, once the call is where the test wants it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import horo

__all__ = ["interrupt", "interrupt_at_random"]


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


def interrupt_at_random(call: Callable[[], Any], error: type[BaseException], after_s: float) -> Any:
    """What ``call()`` returns, unless a signal handler has ended it by ``error`` after ``after_s`` seconds.

    The handler raises in functions of horo alone, so what these have returned is never lost.
    """
    is_armed = True

    def handler(_number: int, frame: FrameType | None) -> None:
        nonlocal is_armed
        if is_armed and _is_within_horo(frame):
            is_armed = False
            raise error

    signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        return call()
    finally:
        is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, _pass_over)


_HORO = f"{Path(horo.__file__).parent}{os.sep}"


def _is_within_horo(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_HORO):
            return True
        frame = frame.f_back
    return False


def _pass_over(*_: object) -> None:
    pass
