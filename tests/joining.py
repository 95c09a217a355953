"""Ranks that really bootstrap, as threads of one process around one store."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import pytest

from horo.bootstrap.job import connect
from horo.bootstrap.launchers import torch_store
from horo.bootstrap.launchers.variables import read_launch
from horo.bootstrap.running_rank import Connection
from horo.bootstrap.store.server import StoreServer
from horo.config.table import read_config

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
