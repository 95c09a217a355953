"""Calls that a thread of its own does, where the exception of a signal handler comes while that thread starts."""

from __future__ import annotations

import signal
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from horo.core.signal_safe_call import CallQueue, ThreadCall
from horo.errors import ResourceError

DEADLINE_S = 30.0
STARTS = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"


class _LeftError(RuntimeError):
    pass


@pytest.fixture
def signals() -> Iterator[None]:
    def handler(*_: object) -> None:
        raise _LeftError

    before = signal.signal(signal.SIGUSR1, handler)
    yield
    signal.signal(signal.SIGUSR1, before)


class _Steps:
    """A step that goes on until it is told to end."""

    def __init__(self) -> None:
        self.begun, self.end, self.done = threading.Event(), threading.Event(), threading.Event()

    def step(self, _call: ThreadCall) -> None:
        self.begun.set()
        assert self.end.wait(DEADLINE_S)
        self.done.set()


@pytest.mark.usefixtures("signals")
def test_an_exception_inside_the_start_of_the_thread_is_the_one_that_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Thread.start`` then fails by a KeyError of its own."""
    steps, start = _Steps(), getattr(threading, STARTS)

    def start_and_interrupt(*args: Any, **named: Any) -> Any:
        started = start(*args, **named)
        assert steps.begun.wait(DEADLINE_S)
        signal.raise_signal(signal.SIGUSR1)
        return started

    queue = CallQueue()
    with monkeypatch.context() as patch:
        patch.setattr(threading, STARTS, start_and_interrupt)
        with pytest.raises(_LeftError):
            queue.do("step", steps.step)
    assert not steps.done.is_set()
    steps.end.set()
    assert queue.do("another", lambda _: 3) == 3  # comes after it
    assert steps.done.is_set()


@pytest.mark.usefixtures("signals")
def test_an_exception_beside_the_lock_of_a_start_is_the_one_that_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Thread.start`` then releases a lock twice, which is a RuntimeError like that of a thread that cannot start."""
    start, gate = getattr(threading, STARTS), threading.Event()
    release = threading.Condition._release_save  # type: ignore[attr-defined]

    def start_behind_gate(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return start(lambda *own: gate.wait(DEADLINE_S) and function(*own), *args, **named)

    def release_and_interrupt(condition: threading.Condition) -> Any:
        released = release(condition)
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGUSR1)
        return released

    with monkeypatch.context() as patch:
        patch.setattr(threading, STARTS, start_behind_gate)
        patch.setattr(threading.Condition, "_release_save", release_and_interrupt)
        with pytest.raises(_LeftError):
            CallQueue().do("step", lambda _: None)
    gate.set()


def test_a_thread_that_cannot_be_started_is_told_also_while_another_error_is_handled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_args: Any, **_named: Any) -> None:
        raise RuntimeError("can't start new thread")

    def try_to_start() -> None:
        with pytest.raises(ResourceError, match="step: no thread can be started"):
            CallQueue().do("step", lambda _: None)

    monkeypatch.setattr(threading, STARTS, types.FunctionType(refuse.__code__, vars(threading)))  # a part of threading
    try_to_start()
    try:
        raise ValueError
    except ValueError:
        try_to_start()
