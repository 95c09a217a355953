"""Ranks joined by a transport, for tests: every kind of link the core knows, and threads that play the ranks."""

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from types import ModuleType
from typing import Any, TypeVar

import native_build
import pytest

from horo.bootstrap.mpi.calls import mpi_calls
from horo.core.setup import MpiUse, native_mpi

_TCP_SOCKETS = {"tcp-unix": 1, "tcp": 1, "tcp-2": 2, "tcp-4": 4, "tcp-unix-3": 3}
"""For data, between each two ranks."""
TCP_KINDS = tuple(_TCP_SOCKETS)
KINDS = (*TCP_KINDS, "mpi")
CONTROL, DATA = 0, 1
NONE, CLOSED, SILENT = 0, 1, 2
"""How a peer was lost."""
DEADLINE_MS = 20_000
PEER_TIMEOUT_MS = 30_000

_Result = TypeVar("_Result")


def run_ranks(count: int, body: Callable[[int], _Result]) -> list[_Result]:
    """Runs body(0) ... body(count - 1) at once; returns the results in rank order or raises the first error."""
    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(body, rank) for rank in range(count)]]


def poll_until(step: Callable[[], bool], what: str) -> None:
    """Calls step until it returns true; fails after the deadline."""
    end = time.monotonic() + DEADLINE_MS / 1000
    while not step():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not happen within {DEADLINE_MS} ms")


def socket_pair(kind: str) -> tuple[socket.socket, socket.socket]:
    """Two connected stream sockets: AF_UNIX for "tcp-unix", TCP over 127.0.0.1 for "tcp"."""
    if kind.startswith("tcp-unix"):
        return socket.socketpair()
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        near = socket.create_connection(listener.getsockname(), timeout=10)
        far, _ = listener.accept()
    return near, far


class Io:
    """One posted send or receive with its memory."""

    def __init__(self, native: ModuleType, data: Any, size: int) -> None:
        self._native = native
        self.data = data
        self.size = size
        self.io = native.ffi.gc(native.lib.shim_io_create(), native.lib.shim_io_destroy)

    @property
    def posted(self) -> bool:
        return bool(self._native.lib.shim_io_state(self.io) == 1)

    @property
    def done(self) -> bool:
        return bool(self._native.lib.shim_io_state(self.io) == 2)

    @property
    def failed(self) -> bool:
        return bool(self._native.lib.shim_io_state(self.io) == 3)

    @property
    def done_bytes(self) -> int:
        return int(self._native.lib.shim_io_done_bytes(self.io))

    def bytes(self) -> bytes:
        return bytes(self._native.ffi.buffer(self.data, self.size))


class Rank:
    """One end of a fabric. Used by one thread at a time."""

    def __init__(self, native: ModuleType, transport: Any) -> None:
        self.native = native
        self.lib = native.lib
        self.transport = transport
        self._kept: list[Io] = []

    def send(self, peer: int, data: bytes, channel: int = DATA) -> Io:
        io = Io(self.native, self.native.ffi.new("char[]", data), len(data))
        status = self.lib.shim_post_send(self.transport, peer, channel, io.data, io.size, io.io)
        return self._posted(io, status)

    def recv(self, peer: int, size: int, channel: int = DATA) -> Io:
        io = Io(self.native, self.native.ffi.new("char[]", max(size, 1)), size)
        status = self.lib.shim_post_recv(self.transport, peer, channel, io.data, io.size, io.io)
        return self._posted(io, status)

    def recv_some(self, peer: int, capacity: int) -> Io:
        """Of the control channel."""
        io = Io(self.native, self.native.ffi.new("char[]", capacity), capacity)
        status = self.lib.shim_post_recv_some(self.transport, peer, io.data, capacity, io.io)
        return self._posted(io, status)

    def _posted(self, io: Io, status: int) -> Io:
        if status != 0:
            raise ValueError(f"posting returned {status}")
        self._kept.append(io)  # the transport keeps pointers until the io is over
        return io

    def progress(self) -> bool:
        return bool(self.lib.shim_progress(self.transport))

    def wait(self, *ios: Io, timeout_ms: int = DEADLINE_MS) -> int:
        """HORO_OK, HORO_ERR_PEER_LOST or HORO_ERR_TIMEOUT."""
        array = self.native.ffi.new("void *[]", [io.io for io in ios])
        return int(self.lib.shim_wait(self.transport, array, len(ios), timeout_ms))

    def sleeps(self, timeout_ms: int = DEADLINE_MS) -> bool:
        """Whether a sleeper on the named descriptors is still asleep after timeout_ms."""
        return not self.lib.shim_sleep(self.transport, timeout_ms)

    @property
    def idle(self) -> bool:
        """Whether nothing would ever wake a sleeper: no descriptor, no need to look."""
        return bool(self.lib.shim_is_idle(self.transport))

    def loss(self, peer: int) -> int:
        """How a peer was lost; NONE if it was not."""
        return int(self.lib.shim_loss(self.transport, peer))

    def destroy(self) -> None:
        if self.transport is not None:
            self.lib.shim_transport_destroy(self.transport)
            self.transport = None


class Fabric:
    """All ranks of a job, every one linked with every other on both channels."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        cut: Callable[[int, int], None],
        fds: Sequence[Sequence[Sequence[int]]] = (),
        *,
        buffers_sends: bool = True,
    ) -> None:
        self.ranks = list(ranks)
        self.cut = cut
        self.buffers_sends = buffers_sends
        self._fds = fds

    def data_fds(self, host: int) -> list[int]:
        """The data sockets of one rank, by peer; none where MPI carries the data."""
        return [fd for fd in self._fds[host][DATA] if fd >= 0] if self._fds else []

    def crash(self, host: int) -> None:
        """Closes one end, as the death of its process would."""
        self.ranks[host].destroy()


Join = Callable[[int], Fabric]


def create_tcp(
    native: ModuleType,
    data_fds: list[int],
    peer_timeout_ms: int = PEER_TIMEOUT_MS,
    control_fds: list[int] | None = None,
    sockets: int = 1,
) -> Rank:
    """``data_fds`` has ``sockets`` per peer. ValueError with status and sentence if the transport is refused."""
    control = native.ffi.NULL if control_fds is None else native.ffi.new("int[]", control_fds)
    status = native.ffi.new("int *")
    error = native.ffi.new("char[]", 1024)
    fds = native.ffi.new("int[]", data_fds)
    transport = native.lib.shim_tcp_create(
        control, fds, len(data_fds) // sockets, sockets, peer_timeout_ms, status, error
    )
    if transport == native.ffi.NULL:
        raise ValueError(f"{status[0]}: {native.ffi.string(error).decode()}")
    return Rank(native, transport)


@contextmanager
def _tcp(native: ModuleType, kind: str, hosts: int) -> Iterator[Fabric]:
    counts = {CONTROL: 1, DATA: _TCP_SOCKETS[kind]}
    fds = [[[-1] * (hosts * counts[channel]) for channel in (CONTROL, DATA)] for _ in range(hosts)]
    for a in range(hosts):
        for b in range(a + 1, hosts):
            for channel, count in counts.items():
                for number in range(count):
                    near, far = socket_pair(kind)
                    fds[a][channel][b * count + number] = near.detach()
                    fds[b][channel][a * count + number] = far.detach()

    def cut(a: int, b: int) -> None:
        for channel, count in counts.items():
            for fd in fds[a][channel][b * count : (b + 1) * count]:
                with socket.socket(fileno=os.dup(fd)) as link:
                    link.shutdown(socket.SHUT_RDWR)

    ranks = [
        create_tcp(native, fds[host][DATA], control_fds=fds[host][CONTROL], sockets=counts[DATA])
        for host in range(hosts)
    ]
    try:
        yield Fabric(ranks, cut, fds)
    finally:
        for rank in ranks:
            rank.destroy()


_MESSAGE_BYTES = 1 << 20
"""Small, so that large ios are cut for MPI."""


def _require_mpi() -> Any:
    """mpi4py's module, where `make test-mpi` has chosen an MPI; skips elsewhere."""
    if native_build.FLAVOUR:
        pytest.skip("an MPI is not built with the sanitizer, which would report its threads and allocations as faults")
    if not os.environ.get("MPI4PY_LIBMPI"):
        pytest.skip("MPI4PY_LIBMPI names no MPI; `make test-mpi` runs this with several")
    mpi = pytest.importorskip("mpi4py.MPI")
    vendor, version = mpi.get_vendor()
    if vendor in {"Open MPI", "MPICH"} and version < (5, 0, 0):
        # Seen with 4.1.4 and 4.0.2. Between processes, messages of one lane are received in their order.
        pytest.skip(f"in {vendor} 4 a process's message to itself that it never receives holds up later ones")
    return mpi


@contextmanager
def _mpi(native: ModuleType, _kind: str, hosts: int) -> Iterator[Fabric]:
    """All ranks are one MPI process that talks with itself; tags tell who means whom."""
    # A communicator of its own, never freed: what a test leaves unreceived must not meet the next one.
    calls = mpi_calls(_require_mpi().COMM_SELF.Dup())
    fds = [[-1] * hosts for _ in range(hosts)]
    for a in range(hosts):
        for b in range(a + 1, hosts):
            near, far = socket_pair("tcp-unix")
            fds[a][b], fds[b][a] = near.detach(), far.detach()

    def create(host: int) -> Rank:
        use = MpiUse(
            calls,
            rank_of_host=[-1 if other == host else 0 for other in range(hosts)],
            send_tags=[1 + host * hosts + other for other in range(hosts)],
            recv_tags=[1 + other * hosts + host for other in range(hosts)],
            message_bytes=_MESSAGE_BYTES,
        )
        keep: list[Any] = []
        status, error = native.ffi.new("int *"), native.ffi.new("char[]", 1024)
        transport = native.lib.shim_mpi_create(
            native.ffi.new("int[]", fds[host]), native_mpi(use, keep, native.ffi), hosts, PEER_TIMEOUT_MS, status, error
        )
        if transport == native.ffi.NULL:
            raise ValueError(f"{status[0]}: {native.ffi.string(error).decode()}")
        return Rank(native, transport)

    def cut(a: int, b: int) -> None:
        with socket.socket(fileno=os.dup(fds[a][b])) as link:
            link.shutdown(socket.SHUT_RDWR)

    ranks = [create(host) for host in range(hosts)]
    try:
        yield Fabric(ranks, cut, buffers_sends=False)
    finally:
        for rank in ranks:
            rank.destroy()


def joining(native: ModuleType, kind: str) -> Iterator[Join]:
    """For fixtures: gives join(hosts), which makes fabrics of one of KINDS, and destroys them afterwards."""
    make = _tcp if kind in TCP_KINDS else _mpi
    with ExitStack() as fabrics:
        yield lambda hosts: fabrics.enter_context(make(native, kind, hosts))


def progress_until(ranks: list[Rank], *ios: Io) -> None:
    """Drives several ranks from one thread until all ios are over."""

    def step() -> bool:
        for rank in ranks:
            rank.progress()
        return not any(io.posted for io in ios)

    poll_until(step, "the end of all ios")
