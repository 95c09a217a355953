"""Ranks as threads: every rank of a group runs the same function with a context of its own."""

from __future__ import annotations

import faulthandler
import functools
import inspect
import math
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import pytest
from fabric import Links, Relay, Relays, close_setup, descriptors_of, make_setups, sockets_of

from horo.core import context as _core
from horo.core.context import Context, Tensor
from horo.core.memory import arena_bytes
from horo.core.setup import Setup

T = TypeVar("T")
SUM = _core.REDUCE_OPS["sum"]
PATIENT: dict[str, Any] = {"spin_us": 10_000, "sleeps_under_contention": False}
"""Ranks that are threads of one interpreter are late for each other: they are to spin until the others come."""
Written = Callable[[], str]
"""What has gone to file descriptor 2 so far."""

_left_behind: list[Any] = []
"""Groups that hang, with the errors whose frames hold the arrays that their threads may still write to."""

_NAMES = [
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bool", "uint16", "uint32", "uint64",
]  # fmt: skip
NUMPY_OF_DTYPE = {name: np.dtype(name).type for name in _NAMES}
NUMPY_OF_COMPLEX: dict[str, Any] = {
    "complex32": np.dtype([("real", np.float16), ("imag", np.float16)]),
    "complex64": np.complex64,
    "complex128": np.complex128,
}
_DTYPE_OF_NUMPY = {np.dtype(t): _core.DTYPES[name] for name, t in (NUMPY_OF_DTYPE | NUMPY_OF_COMPLEX).items()}


LAYOUTS = {
    "1": [0], "2": [0, 0], "3": [0, 0, 0], "8": [0] * 8, "1+1": [0, 1], "2+2": [0, 0, 1, 1], "1+3": [0, 1, 1, 1],
    "3+1+2": [0, 0, 0, 1, 2, 2], "2+2+2+2": [0, 0, 1, 1, 2, 2, 3, 3], "3 interleaved hosts": [0, 1, 2, 0, 1, 2, 0],
    "9 hosts, a tree of four levels": [*range(9), 7], "5 interleaved hosts": [0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 3],
}  # fmt: skip
over_every_layout = pytest.mark.parametrize("host_of_rank", LAYOUTS.values(), ids=LAYOUTS.keys())


def describe(
    arrays: Sequence[np.ndarray], results: Sequence[np.ndarray], wires: Sequence[str | None] = ()
) -> list[Tensor]:
    """Arrays as the core sees them."""
    numbers = [0 if wire is None else _core.DTYPES[wire] for wire in wires] or [0] * len(arrays)
    return [
        Tensor(a.ctypes.data, b.ctypes.data, a.shape, _DTYPE_OF_NUMPY[a.dtype], number, b.nbytes)
        for a, b, number in zip(arrays, results, numbers, strict=True)
    ]


def rows_of(rows: int, size: int, place: int) -> slice:
    """Of a reduce-scatter: the first ranks have one row more."""
    base, longer = divmod(rows, size)
    first = place * base + min(place, longer)
    return slice(first, first + base + (place < longer))


class Rank:
    """One rank with numpy arrays instead of torch tensors."""

    group: Group
    """Of ``Group.run``."""

    def __init__(self, context: Context, links: Links | None = None) -> None:
        self.context, self._links = context, links
        self.rank = context.rank
        self.size = context.size
        self._kept: dict[int, Any] = {}

    def submit(
        self,
        op: str,
        name: str,
        arrays: Sequence[np.ndarray],
        *,
        outputs: Sequence[np.ndarray] | None = None,
        wires: Sequence[str | None] = (),
        **options: Any,
    ) -> int:
        """Starts an operation, in place unless there are outputs; ``wires``: the dtypes that the arrays travel as."""
        results = arrays if outputs is None else outputs
        tensors = describe(arrays, results, wires)
        handle = self.context.submit(_core.RequestBuffer.of(_core.OPS[op], name, tensors, **options))
        self._kept[handle] = arrays, results
        return handle

    def run(self, op: str, name: str, arrays: Sequence[np.ndarray], **options: Any) -> None:
        """Submits, waits and releases in one call, in place."""
        self.context.run(_core.RequestBuffer.of(_core.OPS[op], name, describe(arrays, arrays), sync=True, **options))

    def send(self, array: np.ndarray, peer: int, tag: int = 0, **options: Any) -> int:
        handle = self.context.send(describe([array], [array])[0], peer, tag, **options)
        self._kept[handle] = array
        return handle

    def receive(self, array: np.ndarray, peer: int | None = None, tag: int = 0, **options: Any) -> int:
        handle = self.context.receive(describe([array], [array])[0], peer, tag, **options)
        self._kept[handle] = array
        return handle

    def finish(self, *handles: int) -> None:
        """Waits and releases, also when an operation fails; not when a signal ends the wait before it is done."""
        for handle in handles:
            try:
                self.context.wait(handle)
            finally:
                if self.context.poll(handle):
                    self.context.release(handle)
                    self._kept.pop(handle, None)

    def mark(self, name: object) -> None:
        """Lets ranks of the group go on that wait for this mark, without a call of the core."""
        self.group.mark(name).set()

    def await_mark(self, *names: object, timeout_s: float = 60) -> None:
        for name in names:
            assert self.group.mark(name).wait(timeout_s), f"no rank has come to {name!r}"

    def meet(self) -> None:
        """Waits until all ranks of the group are here, without a call of the core."""
        self.group.together.wait(60)

    def is_common(self, name: object, value: object) -> bool:
        """Whether the value of this name is equal on all ranks of the group that have come here so far."""
        return bool(self.group.values.setdefault(name, value) == value)

    def add_team(self, ranks: Sequence[int]) -> int:
        """With links where its members are on several hosts."""
        return self.context.add_team(ranks, **(self._links.of(self.rank, ranks) if self._links else {}))

    def allreduce(self, array: np.ndarray, name: str = "x", op: str = "sum", **options: Any) -> np.ndarray:
        self.finish(self.submit("allreduce", name, [array], reduce_op=_core.REDUCE_OPS[op], **options))
        return array

    def broadcast(self, array: np.ndarray, root: int, name: str = "b", **options: Any) -> np.ndarray:
        self.finish(self.submit("broadcast", name, [array], root_rank=root, **options))
        return array

    def reducescatter(self, array: np.ndarray, name: str = "s", op: str = "sum", **options: Any) -> np.ndarray:
        """This rank's rows; the input stays as it is."""
        result, before = np.full_like(array[rows_of(len(array), self.size, self.rank)], 99), array.copy()
        options["reduce_op"] = _core.REDUCE_OPS[op]
        self.finish(self.submit("reducescatter", name, [array], outputs=[result], **options))
        assert np.array_equal(before, array)
        return result

    def barrier(self, name: str = "barrier", **options: Any) -> None:
        self.finish(self.submit("barrier", name, [], **options))

    def allgather(self, array: np.ndarray, name: str = "g", **options: Any) -> tuple[np.ndarray, list[int]]:
        handle = self.submit("allgather", name, [array], **options)
        try:
            self.context.wait(handle)
            data, first_dims = self.context.take_result(handle, 0)
        finally:
            self.context.release(handle)
            del self._kept[handle]
        return np.frombuffer(data, array.dtype).reshape(sum(first_dims), *array.shape[1:]), first_dims


_RANKS_THAT_REPORT = 32
"""In a group of more, a rank that waits does not report where. A report looks at the frames of all threads, so that on
a busy machine those of the ranks that wait kept the interpreter from the ranks that they waited for."""


class Group:
    """All ranks of a job inside this process, sharing the mappings of their arenas (so that TSan sees every race)."""

    def __init__(
        self,
        hosts: Sequence[int] = (2,),
        *,
        relay: Relay | None = None,
        rewire: Callable[[list[Setup]], list[Setup]] | None = None,
        teams: int = 4,
        **options: Any,
    ) -> None:
        """``relay`` slows links between hosts, ``rewire`` may put other descriptors into the setups; there is room for
        so many ``teams``; ``options`` are those of ``make_setups``.
        """
        self._relays = None if relay is None else Relays(relay)
        setups = make_setups(hosts, relays=self._relays, **options)
        if self._relays is not None:
            self._relays.start()
        if rewire is not None:
            setups = rewire(setups)
        self._mappings: dict[int, mmap.mmap] = {}
        self._teams = teams
        self._errors: list[BaseException] = []
        self._gone = [threading.Event() for _ in setups]
        self._hosts = [setup.host_of_rank[setup.rank] for setup in setups]
        self.links = Links(self._hosts, options.get("sockets_per_peer", 1))
        self._marks: dict[object, threading.Event] = {}
        self.values: dict[object, object] = {}
        self.together = threading.Barrier(len(setups))
        self.contexts: list[Context] = []
        self._ends: list[list[socket.socket]] = []
        self._control: list[list[socket.socket]] = []
        self._data: list[list[socket.socket]] = []
        for setup in setups:
            life, control, data = (
                [socket.socket(fileno=os.dup(fd)) for fd in fds if fd >= 0]
                for fds in (setup.life_fds, setup.control_fds, setup.data_fds)
            )
            self._ends.append([*life, *control, *data])
            self._control.append(control)
            self._data.append(data)
            self.contexts.append(Context(self._share(setup)))
            if len(setups) > _RANKS_THAT_REPORT:
                self.contexts[-1].blocked_after_s = math.inf

    def _share(self, setup: Setup) -> Setup:
        host = setup.host_of_rank[setup.rank]
        if host not in self._mappings:
            local_size = list(setup.host_of_rank).count(host)
            room = arena_bytes(local_size, setup.segment_bytes, self._teams)
            os.ftruncate(setup.arena_fd, room)
            self._mappings[host] = mmap.mmap(setup.arena_fd, room)
        return replace(setup, arena_memory=self.arena_address(host), arena_memory_bytes=len(self._mappings[host]))

    def arena_address(self, host: int) -> int:
        """Where all ranks of a host see its arena."""
        return int(np.frombuffer(self._mappings[host], np.uint8).ctypes.data)

    def mark(self, name: object) -> threading.Event:
        return self._marks.setdefault(name, threading.Event())

    def rank(self, number: int) -> Rank:
        made = Rank(self.contexts[number], self.links)
        made.group = self
        return made

    def run(self, function: Callable[[Rank], T], timeout_s: float = 150, ranks: Sequence[int] | None = None) -> list[T]:
        """Runs the function on every rank at once; the first exception is raised, a hang prints all stacks."""
        chosen = range(len(self.contexts)) if ranks is None else ranks
        results: dict[int, T] = {}
        errors = self._errors

        def body(rank: int) -> None:
            try:
                results[rank] = function(self.rank(rank))
            except BaseException as error:
                errors.append(error)
                self.together.abort()
                for mark in [*self._marks.values()]:  # nobody waits for this rank any more
                    mark.set()

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in chosen]
        if not _run_all(threads, timeout_s):
            raise TimeoutError(f"ranks hang after {timeout_s} s; errors so far: {errors}")
        if errors:
            raise errors[0]
        return [results[rank] for rank in chosen]

    def kill(self, rank: int, team_sockets: Collection[str] = ()) -> None:
        """The others see all streams of a rank end at once and without a message, as when its process dies.

        The rank's engine lives on in this process. If its streams ended one after the other, it could take the first
        end for the loss of that peer and say so on the next stream. So its descriptors are replaced by a socket that
        nobody reads before any stream ends. The engine is told of the end last, by when its host knows who died.
        ``team_sockets``: those for teams that ``Rank.add_team`` has not made, as ``sockets_of`` names them.
        """
        own = {end.fileno() for end in self._ends[rank]}
        with ExitStack() as opened:
            mute, far = map(opened.enter_context, socket.socketpair())
            mute.setblocking(False)
            streams = [*self._ends[rank]]
            for fd in descriptors_of(sockets_of(own) | self.links.sockets_of(rank) | set(team_sockets)) - own:
                streams.append(opened.enter_context(socket.socket(fileno=os.dup(fd))))
                os.dup2(mute.fileno(), fd, inheritable=False)
            for stream in streams:
                with suppress(OSError):  # the other end is closed
                    stream.shutdown(socket.SHUT_RDWR)
            self._gone[rank].set()
            host = self._hosts[rank]
            if any(self._hosts[other] == host and not gone.is_set() for other, gone in enumerate(self._gone)):
                wait_for(lambda: self.contexts[rank].health() is not None)
            far.shutdown(socket.SHUT_RDWR)

    def await_kill(self, rank: int) -> None:
        """Until all streams of a rank have ended."""
        assert self._gone[rank].wait(20)

    def say(self, rank: int, data: bytes) -> None:
        """Writes into a leader's first control link, as if the leader had."""
        self._control[rank][0].sendall(data)

    def data_end(self, rank: int, number: int) -> socket.socket:
        """The ``number``-th of a rank's streams for data."""
        return self._data[rank][number]

    def leave(self, rank: int) -> None:
        """Shuts a rank down, as a process that ends in order does: afterwards its streams are closed."""
        self._gone[rank].set()
        self.contexts[rank].destroy()
        for end in self._ends[rank]:
            end.close()

    def destroy(self) -> None:
        """Shuts all ranks down at once, as processes that end together do."""
        threads = [threading.Thread(target=self.leave, args=(r,), daemon=True) for r in range(len(self.contexts))]
        if not _run_all(threads, 150):
            raise TimeoutError("ranks hang while they shut down, after 150 s")
        if self._relays is not None:
            self._relays.close()

    def destroy_while(self, let_go: Callable[[], object]) -> None:
        """Shuts all ranks down, which wait for what ``let_go`` does meanwhile."""
        with ThreadPoolExecutor() as pool:
            leaving = pool.submit(self.destroy)
            let_go()
            leaving.result(60)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is TimeoutError:  # ranks that hang would not let themselves be shut down either
            _left_behind.append(self)
        else:
            self.destroy()


def _run_all(threads: Sequence[threading.Thread], timeout_s: float) -> bool:
    """Starts all and waits until all have ended; if some do not in time, prints the stacks of all."""
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if not any(thread.is_alive() for thread in threads):
        return True
    with tempfile.TemporaryFile() as stacks:  # pytest's sys.stderr has no descriptor
        faulthandler.dump_traceback(stacks, all_threads=True)
        stacks.seek(0)
        sys.stderr.write(stacks.read().decode())
    return False


def run_ranks(function: Callable[[Rank], T], hosts: Sequence[int] = (2,), **options: Any) -> list[T]:
    """A group for one function."""
    with Group(hosts, **options) as group:
        return group.run(function)


def on_ranks(
    *given: str | Sequence[int], times: int = 1, within_s: float = 150, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of what every rank of a group runs, with ``options`` of ``make_setups``.

    ``given``: layouts, with each of which the test runs; or names of its parameters that go to ``make_setups``, among
    them ``hosts``. Neither: two ranks of one host. Other parameters are those of the test, fixtures among them, but
    ``written``, which is that of ``recorded_stderr``. ``times``: how often it runs, with a group of its own each time.
    """
    layouts = [each for each in given if not isinstance(each, str)]
    passed = [each for each in given if isinstance(each, str)]

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        own = [name for name in inspect.signature(body).parameters if name not in {"rank", "written"}]
        is_recorded = "written" in inspect.signature(body).parameters

        def test(**values: Any) -> None:
            hosts = values.get("hosts", layouts[0] if layouts else (2,))
            more = {name: values[name] for name in passed if name != "hosts"}
            for turn in range(times):
                print("turn", turn)  # shown if it fails
                with recorded_stderr() if is_recorded else nullcontext() as written:
                    called = {name: values[name] for name in own} | ({"written": written} if is_recorded else {})
                    with Group(hosts, **options, **more) as group:
                        group.run(lambda rank, called=called: body(rank, **called), within_s)  # type: ignore[misc]

        names = dict.fromkeys([*own, *passed, *(["hosts"] if len(layouts) > 1 else [])])
        functools.update_wrapper(test, body)
        del test.__wrapped__  # type: ignore[attr-defined]  # whose parameters pytest would take
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        )
        return pytest.mark.parametrize("hosts", layouts, ids=str)(test) if len(layouts) > 1 else test

    return decorate


def forked(hosts: Sequence[int], mine: int | None = 0, **options: Any) -> tuple[Any, dict[int, int]]:
    """Forks ranks as processes of their own, but rank ``mine``, which this process is; and the processes of the others.

    Those have none; without ``mine``, this process has no rank.
    """
    setups = make_setups(hosts, **options)
    processes: dict[int, int] = {}
    me = mine
    for other in sorted({*range(len(setups))} - {mine}):
        processes[other] = os.fork()
        if processes[other] == 0:
            me, processes = other, {}
            break
    for rank, setup in enumerate(setups):
        if rank != me:
            close_setup(setup)
    return None if me is None else Rank(Context(setups[me])), processes


def run_script(script: str, *words: object, **env: str) -> str:
    """What a program of its own, whose ranks are processes that it forks, writes.

    It has numpy and modules of Python for processes; and ``Rank``, ``forked`` and ``wait_for`` of this module.
    """
    head = "import ctypes, os, select, signal, struct, sys, threading, time\nimport numpy as np\n"
    head += "from ranks import Rank, forked, wait_for"
    folder = Path(__file__).resolve().parent
    path = [str(folder), str(folder.parent), str(folder.parent.parent)]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{head}\n{script}", *map(str, words)]
    env = {**os.environ, **env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def recorded_stderr() -> Iterator[Callable[[], str]]:
    """Gives a function that returns what has gone to file descriptor 2 so far; at the end that goes where it belongs.

    It may be called while others write: ``capfd.readouterr()`` loses what comes while it empties its file.
    """
    kept = os.dup(2)
    with tempfile.NamedTemporaryFile("ab") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: Path(file.name).read_text("utf-8", "replace")
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            sys.stderr.write(Path(file.name).read_text("utf-8", "replace"))


def context_of(native: ModuleType, rank: Rank) -> Any:
    """A rank's context as the shims of ``native`` take it."""
    return native.ffi.cast("void *", int(_core.ffi.cast("uintptr_t", rank.context._context)))


def wait_for(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    pause_s = 0.0001
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the condition did not come true in time")
        threading.Event().wait(pause_s)
        pause_s = min(2 * pause_s, 0.005)
