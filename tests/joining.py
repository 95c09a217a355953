"""Ranks that really bootstrap, as threads of one process around one store; whom their descriptors really join."""

import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import pytest

from horo.bootstrap.host.grouping import Grouping
from horo.bootstrap.job import connect
from horo.bootstrap.launchers import torch_store
from horo.bootstrap.launchers.variables import read_launch
from horo.bootstrap.running_rank import Connection
from horo.bootstrap.store.server import StoreServer
from horo.config.table import read_config
from horo.core.memory import arena_bytes
from horo.core.setup import Setup, setup_descriptors

SECRET = bytes(range(32))

T = TypeVar("T")


@contextmanager
def serving() -> Iterator[StoreServer]:
    """A store on loopback."""
    with StoreServer(["127.0.0.1"], SECRET) as server:
        yield server


def environments(
    server: StoreServer, size: int, common: Mapping[str, str] | None = None, hosts: Sequence[str] = ()
) -> list[dict[str, str]]:
    """What hororun would tell ``size`` ranks, without local ranks; ``common`` is added to all; ``hosts``: of each."""
    return [
        {
            "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size), "HOROVOD_HOSTNAME": f"name{rank}",
            "HORO_STORE": ",".join(map(str, server.endpoints)), "HORO_SECRET": SECRET.hex(),
            "HORO_START_TIMEOUT": "20", **(common or {}), **({"HORO_HOST_ID": hosts[rank]} if hosts else {}),
        }
        for rank in range(size)
    ]  # fmt: skip


def run_threads(functions: Sequence[Callable[[], T]]) -> list[T | BaseException]:
    """The result of each function, or what it raised; all run at once. The process may end before one that hangs."""
    runs = [Future[T]() for _ in functions]

    def run(function: Callable[[], T], ended: Future[T]) -> None:
        try:
            ended.set_result(function())
        except BaseException as error:
            ended.set_exception(error)

    for pair in zip(functions, runs, strict=True):
        threading.Thread(target=run, args=pair, daemon=True).start()
    return [ended.exception(60) or ended.result() for ended in runs]


class _OfThreads(threading.local):
    """Each thread's own connections to torch's store, as of a process: in one, a call waits for that of another."""

    def __init__(self) -> None:
        self._opened: dict[object, object] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._opened

    def __getitem__(self, key: object) -> object:
        return self._opened[key]

    def __setitem__(self, key: object, store: object) -> None:
        self._opened[key] = store


def join_all(environs: Sequence[Mapping[str, str]], epoch: int = 1) -> list[Connection | BaseException]:
    """``connect`` for every environment at once."""

    def joiner(environ: Mapping[str, str]) -> Callable[[], Connection]:
        return lambda: connect(read_launch(environ), read_config(environ), epoch, [])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_store, "_opened", _OfThreads())
        return run_threads([joiner(environ) for environ in environs])


POWERS = {1 << bit for bit in range(20)}


def check_wiring(setups: Sequence[Setup]) -> None:
    """Sends a byte over every stream, wakes every eventfd and writes to every arena; ``setups`` in rank order."""
    grouping = Grouping(tuple(setups[0].host_of_rank))
    for setup in setups:
        assert tuple(setup.host_of_rank) == grouping.host_of_rank
        assert len(setup.host_name_of_rank) == setup.size == len(setups)
        assert not any(map(os.get_inheritable, setup_descriptors(setup)))
        _check_shape(setup, grouping)
    for setup in setups:
        _check_arena(setup, setups, grouping)
        _check_lives(setup, setups, grouping)
    control, data = [setup.control_fds for setup in setups], [setup.data_fds for setup in setups]
    check_links(grouping, control, data, setups[0].sockets_per_peer)


def check_links(
    grouping: Grouping, control: Sequence[Sequence[int]], data: Sequence[Sequence[int]], sockets: int
) -> None:
    """Sends a byte over every stream between hosts, and sees that there is no other; all ranks are in this process.

    ``control``: by rank, descriptors by host; ``data``: by rank, ``sockets`` descriptors by host.
    """
    for rank in range(grouping.size):
        _check_link_shape(grouping, rank, control[rank], data[rank], sockets)
        index, host = grouping.local_index(rank), grouping.host_of_rank[rank]
        for other, fd in enumerate(control[rank]):
            if fd >= 0:
                peer = grouping.hosts[other][0]
                _check_stream(fd, control[peer][host], b"control %d %d" % (rank, peer))
        for place, fd in enumerate(data[rank]):
            if fd >= 0:
                other, number = divmod(place, sockets)
                peer = grouping.hosts[other][index]
                _check_stream(fd, data[peer][host * sockets + number], b"data %d %d %d" % (rank, peer, number))


def _check_shape(setup: Setup, grouping: Grouping) -> None:
    """Exactly the descriptors that the contract in horo.h names are there."""
    index, local = grouping.local_index(setup.rank), len(grouping.members(setup.rank))
    assert len(setup.life_fds) == local
    assert len(setup.wake_fds) == (local if len(grouping.hosts) > 1 else 0)
    assert min(setup.wake_fds, default=0) >= 0
    lives = set(range(1, local)) if index == 0 else {0}
    assert {i for i, fd in enumerate(setup.life_fds) if fd >= 0} == lives


def _check_link_shape(grouping: Grouping, rank: int, control: Sequence[int], data: Sequence[int], sockets: int) -> None:
    host, index, hosts = grouping.host_of_rank[rank], grouping.local_index(rank), len(grouping.hosts)
    near = {h for h in range(1, hosts) if h & (h - 1) == host} | ({host & (host - 1)} if host else set())
    assert len(control) == hosts
    assert {i for i, fd in enumerate(control) if fd >= 0} == (near if index == 0 else set())
    far = {h for h in range(hosts) if any(((h - host) * sign) % hosts in POWERS for sign in (1, -1))}
    if index >= grouping.owner_count:
        far = set()
    assert len(data) == hosts * sockets
    assert {i for i, fd in enumerate(data) if fd >= 0} == {h * sockets + n for h in far for n in range(sockets)}


def _check_arena(setup: Setup, setups: Sequence[Setup], grouping: Grouping) -> None:
    members = grouping.members(setup.rank)
    with mmap.mmap(setup.arena_fd, 0) as memory:
        assert len(memory) >= arena_bytes(len(members), setup.segment_bytes)
        memory[setup.rank] = 1 + setup.rank % 255
        for other in setups:
            with mmap.mmap(other.arena_fd, 0) as seen:
                shared = other.rank in members
                assert (seen[setup.rank] == 1 + setup.rank % 255) == shared
        memory[setup.rank] = 0
    for index, member in enumerate(members if setup.wake_fds else ()):
        os.eventfd_write(setup.wake_fds[index], 1 + setup.rank)
        own = setups[member].wake_fds[index]
        assert os.eventfd_read(own) == 1 + setup.rank
        assert not os.get_blocking(own)


def _check_lives(setup: Setup, setups: Sequence[Setup], grouping: Grouping) -> None:
    index = grouping.local_index(setup.rank)
    for other, fd in enumerate(setup.life_fds):
        if fd >= 0:
            peer = setups[grouping.members(setup.rank)[other]]
            _check_stream(fd, peer.life_fds[index], b"life %d %d" % (setup.rank, peer.rank))


def _check_stream(near: int, far: int, message: bytes) -> None:
    with socket.socket(fileno=os.dup(near)) as sender, socket.socket(fileno=os.dup(far)) as receiver:
        sender.settimeout(10)
        receiver.settimeout(10)
        sender.sendall(message)
        assert receiver.recv(len(message), socket.MSG_WAITALL) == message
