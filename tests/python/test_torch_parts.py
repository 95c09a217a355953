"""Parts of ``horo.torch`` alone: bytes of tensors, the cache of requests, calls that a thread of its own does."""

from __future__ import annotations

import gc
import pickle
import signal
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from horo.core.signal_safe_call import CallQueue, ThreadCall
from horo.errors import ResourceError
from horo.torch.engine.operation import Operation
from horo.torch.engine.request_cache import RequestCache
from horo.torch.engine.tensor_bytes import bytes_of, tensor_of


@pytest.mark.parametrize("data", [b"", b"\0", b"abc" * 1000])
def test_bytes_go_into_a_tensor_and_come_back(data: bytes) -> None:
    assert tensor_of(data).dtype == torch.uint8
    assert bytes(bytes_of(tensor_of(data))) == data


def test_every_dtype_has_bytes() -> None:
    assert bytes(bytes_of(torch.tensor([1, 2], dtype=torch.int16))) == b"\1\0\2\0"
    assert bytes(bytes_of(torch.tensor(True))) == b"\1"
    assert len(bytes_of(torch.ones(3, 5, dtype=torch.bfloat16))) == 30
    assert bytes(bytes_of(torch.arange(6, dtype=torch.uint8)[2:4])) == b"\2\3"


def test_a_view_keeps_the_tensor_and_reads_its_memory() -> None:
    tensor = tensor_of(pickle.dumps({"a": 1}))
    alive = weakref.ref(tensor)
    part = bytes_of(tensor)[:]
    tensor[0] = 7
    assert part[0] == 7
    del tensor
    gc.collect()
    assert alive() is not None
    assert len(part) > 0
    del part
    gc.collect()
    assert alive() is None


class Owner:
    """Stands for an optimizer."""


def test_another_thread_may_make_room_while_the_rooms_are_added_up() -> None:
    cache = RequestCache(lambda kind, name, _: f"{kind}.{name}")
    owners = [Owner() for _ in range(3)]

    class Gradients(int):
        """A number of gradients; while it is added to others, an optimizer of another thread comes."""

        def __rmul__(self, other: int) -> Gradients:
            return self

        __mul__ = __rmul__

        def __radd__(self, other: int) -> int:
            thread = threading.Thread(target=cache.make_room, args=(owners[2], 1))
            thread.start()
            thread.join(timeout=30)
            return other

    gradients: Any = Gradients(1)
    cache.make_room(owners[0], gradients)
    cache.make_room(owners[1], 1)
    cache.take_or_create("key", Operation("allreduce", "a"), sync=True, tensor_count=1).idle.append(None)
    assert cache.take("key") is not None


LIMIT_S = 30.0
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
        assert self.end.wait(LIMIT_S)
        self.done.set()


@pytest.mark.usefixtures("signals")
def test_an_exception_inside_the_start_of_the_thread_is_the_one_that_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Thread.start`` then fails by a KeyError of its own."""
    steps, start = _Steps(), getattr(threading, STARTS)

    def start_and_interrupt(*args: Any, **named: Any) -> Any:
        started = start(*args, **named)
        assert steps.begun.wait(LIMIT_S)
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
        return start(lambda *own: gate.wait(LIMIT_S) and function(*own), *args, **named)

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
