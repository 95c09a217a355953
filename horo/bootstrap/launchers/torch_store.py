"""torch's TCPStore as the job's store, for jobs started by torchrun. The only module here that needs torch.

Trust: torch's store does not authenticate its clients. The secret of a start is derived from nonces of all ranks, which
are in the store (``start_secret``). Unless the user has set ``HORO_SECRET`` on all nodes, every process that can reach
the store can therefore join the job, as with torch.distributed. ``HORO_SECRET`` is not in the store: with it, no other
process can derive the secret of the start, and each value carries a MAC (``store.signed``).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from horo.bootstrap.launchers.variables import TorchMaster
from horo.bootstrap.net.interfaces import route_source
from horo.bootstrap.store.protocol import StoreAbandonedError, StoreTimeoutError
from horo.errors import PeerLostError, ResourceError

__all__ = ["TorchStore", "open_torch_store", "source_towards"]

_LOOK_FIRST_S, _LOOK_LAST_S = 0.001, 0.25
"""Pause between two looks for a key. torch's own wait writes lines to stderr when its time is over."""
_LOOK_S = 0.1
"""Wait for a key as a check whether it exists, for versions of torch without ``check``."""
_FAILURES = (RuntimeError, TimeoutError)
"""Exceptions of torch's store: the oldest versions of torch raise TimeoutError where others raise their own class."""


class TorchStore:
    """``protocol.Store`` over an object with the methods of ``torch.distributed.Store``."""

    def __init__(self, store: Any, where: str) -> None:
        self._store = store
        self._where = where
        self.meanwhile: list[Callable[[], bool]] = []
        """Called at each look for keys that are not there yet; after a true result the next look comes soon."""

    @property
    def place(self) -> str:
        """The host and the port of the store, as MASTER_ADDR and MASTER_PORT name them."""
        return f"{self._store.host}:{self._store.port}"

    def set(self, key: str, value: bytes) -> None:
        self._call("set", key, value)

    def get_many(self, keys: Sequence[str], timeout_s: float, unless: str | None = None) -> list[bytes]:
        deadline, pause_s = time.monotonic() + timeout_s, _LOOK_FIRST_S
        while True:
            if keys and self._has(keys):  # first: each question is a way to the store and back
                return [bytes(value) for value in self._call("multi_get", list(keys))]
            if unless is not None and self._has([unless]):
                raise StoreAbandonedError(bytes(self._call("get", unless)))
            if not keys:
                return []
            if sum(call() for call in self.meanwhile):
                pause_s = _LOOK_FIRST_S
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise StoreTimeoutError([key for key in keys if not self._has([key])] or list(keys))
            time.sleep(min(left_s, pause_s))
            pause_s = min(2 * pause_s, _LOOK_LAST_S)

    def get(self, key: str, timeout_s: float, unless: str | None = None) -> bytes:
        return self.get_many([key], timeout_s, unless)[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._call("delete_key", key)

    def set_on_disconnect(self, key: str, value: bytes | None) -> None:
        """Does nothing: torch's store does not detect a lost client. torchrun's agent does, and ends the job."""

    def close(self) -> None:
        """The connection is kept for the process's next start; torch closes it at exit."""

    def _has(self, keys: Sequence[str]) -> bool:
        """Whether the store has all of them."""
        if hasattr(self._store, "check"):
            return bool(self._call("check", list(keys)))
        # torch 2.1 has no check(), and its compare_set() crashes on a key that is missing.
        try:
            self._store.wait(list(keys), timedelta(seconds=_LOOK_S))
        except _FAILURES:
            self._call("num_keys")  # fails where the store is gone
            return False
        return True

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, method)(*arguments)
        except _FAILURES as error:
            raise PeerLostError(f"torch's store at {self._where} is gone: {error}") from error


_opened: dict[tuple[int, TorchMaster], TorchStore] = {}
"""One connection per process and store. If rank 0 serves the store, other ranks may need it after rank 0 is done."""


def open_torch_store(master: TorchMaster, rank: int, timeout_s: float) -> tuple[TorchStore, str | None]:
    """Joins torchrun's store; serves it on rank 0 if the agent does not.

    Returns:
        The store, and the numeric address of this machine from which it is reached, None if unknown.

    Raises:
        ResourceError: torch is not installed. PeerLostError: no store answers at MASTER_ADDR and MASTER_PORT.
    """
    key = (os.getpid(), master)
    where = f"{master.address}:{master.port} (MASTER_ADDR, MASTER_PORT)"
    if key not in _opened:
        try:
            import torch.distributed as torch_distributed  # noqa: PLC0415 - the rest of the bootstrap needs no torch
        except ImportError as error:
            raise ResourceError(f"this job was started by torchrun, but torch cannot be imported: {error}") from error
        try:
            # multi_tenant: init_process_group(env://) in the same script hosts its store on the same port.
            store: Any = torch_distributed.TCPStore(  # type: ignore[attr-defined, unused-ignore]
                master.address,
                master.port,
                is_master=rank == 0 and not master.served_by_agent,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except _FAILURES as error:
            raise PeerLostError(
                f"torch's store at {where} cannot be reached: {error}. (torch asks a name server about every peer, one "
                "after the other: where that is slow, raise HORO_START_TIMEOUT or name the hosts in /etc/hosts.)"
            ) from error
        _opened[key] = TorchStore(store, where)
    return _opened[key], source_towards(master.address)


def source_towards(host: str) -> str | None:
    """The numeric address of this machine from which it reaches a host; None: unknown."""
    # MASTER_ADDR may be a name: torch has just resolved it, so this look-up adds no new dependency on a name server.
    with contextlib.suppress(OSError):
        for _, _, _, _, sockaddr in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            source = route_source(str(sockaddr[0]))
            if source is not None:
                return source
    return None
