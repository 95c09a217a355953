"""Signal handlers that raise while a request goes into the core: its memory stays, and so does the way out."""

import contextlib
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupts import do_at
from rank_pool import on

import horo.torch as hvd
from horo.torch.engine import runtime as _runtime


class _StopError(Exception):
    pass


def _fail() -> None:
    raise _StopError


_FORMS: dict[str, Callable[[torch.Tensor, str], Any]] = {
    "async in place": lambda t, n: hvd.allreduce_async_(t, name=n),
    "grouped": lambda t, n: hvd.grouped_allreduce_async_([t], name=n),
    "allgather": lambda t, n: hvd.allgather_async(t, name=n),
    "sync": lambda t, n: hvd.allreduce(t, name=n, op=hvd.Sum),
    "sync broadcast": lambda t, n: hvd.broadcast(t, 0, name=n),
}


@pytest.mark.parametrize("warm", [False, True], ids=["first", "again"])
@pytest.mark.parametrize("form", _FORMS)
@on("ranks2")
def test_memory_stays_wherever_the_interrupt_comes(form: str, warm: bool) -> None:
    call, runtime = _FORMS[form], _runtime.current()
    waits = form.startswith("sync")
    places = 5 if waits else 100  # a wait has no end

    def take_part(name: str) -> None:
        answer = call(torch.ones(8), name)
        if not waits:
            hvd.synchronize(answer)

    if warm:
        for at in range(places if waits else 20):
            take_part(f"{form}.{at}")
    if hvd.rank() == 1:
        for name in hvd.broadcast_object(None):
            take_part(name)
        return
    names = []
    more = True
    while more and len(names) < places:
        names.append(f"{form}.{len(names)}")
        before = runtime.core.counters()["requests"]
        tensor = torch.ones(8)
        memory = weakref.ref(tensor)
        with contextlib.suppress(_StopError):
            more = do_at(lambda: call(tensor, names[-1]), len(names) - 1, _fail, {"horo_submit", "go_on"})  # noqa: B023
        del tensor
        gc.collect()  # frames that the exception has kept
        assert not runtime.active_calls, names[-1]
        assert runtime.core.counters()["requests"] == before + 1
        assert runtime.core.in_progress(before + 1)
        assert memory() is not None, f"{names[-1]}: the memory is gone while the core works on it"
    assert len(names) >= 5
    hvd.broadcast_object(names)
    for request in list(runtime.requests.values()):
        request.wait()
    deadline = time.monotonic() + 50
    while runtime.abandoned:  # until rank 1 has taken part in all
        runtime.release_abandoned()
        assert time.monotonic() < deadline
