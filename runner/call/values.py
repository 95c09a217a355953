"""Objects in a store that only the caller and its ranks can reach: pickled, and cut into values of its size.

They are written and read piece by piece, so that neither side holds a whole pickled object beside the object itself.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

from horo.bootstrap.net.addresses import parse_endpoints
from horo.bootstrap.store.client import StoreClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["CALL", "FAILURES", "WORKERS", "Call", "Outcome", "connect", "get", "outcome_key", "put", "result_key"]

_CONNECT_S = 60.0
_PIECE_BYTES = 4 << 20
CALL = "call"
"""The key of the function and its arguments."""
FAILURES = "failures"
"""The key at which failures are counted."""
WORKERS = "workers"
"""The key at which the processes of an elastic job are counted."""


class Call(NamedTuple):
    """The call that each rank makes.

    Attributes:
        function: pickled apart, since it needs the folders.
        front: folders of modules, the part of the caller's ``sys.path`` that comes before Python's own folders.
        back: the rest of it, in which this Python may find what its own folders lack.
        hidden: variables that are not for the function.
    """

    function: bytes
    front: list[str]
    back: list[str]
    hidden: list[str]


class Outcome(NamedTuple):
    """The end of the function in a rank.

    Attributes:
        has_result: whether it has returned; what, is at ``result_key``. False: an exception ended it.
        error: the exception, pickled; None: it cannot be pickled, or there is none.
        text: the traceback as Python prints it.
        summary: the exception in one line.
        host: of the rank.
        order: number of this failure among those of all ranks; 0: it is no failure.
        place: in an elastic job, the last generation that the process was in, and its rank there.
    """

    has_result: bool
    error: bytes | None
    text: str
    summary: str
    host: str
    order: int
    place: tuple[int, int] = (0, 0)


def outcome_key(rank: int) -> str:
    """The key of the ``Outcome`` of a rank, or of a process of an elastic job, in the order of their begins."""
    return f"outcome/{rank}"


def result_key(rank: int) -> str:
    """The key of the function's result there."""
    return f"result/{rank}"


def connect(endpoints: str, secret: bytes) -> StoreClient:
    """A connection to the store of this call, as either side makes it.

    Args:
        endpoints: of the store, ``ADDRESS:PORT`` and commas; the first that answers is used.
        secret: of the call.

    Raises:
        PeerLostError: none answers.
    """
    first, *others = parse_endpoints(endpoints)
    return StoreClient(first.address, first.port, secret, _CONNECT_S, others, served_by="horo.run")


def put(store: StoreClient, key: str, value: Any, make_pickler: Callable[[Any], Any] = pickle.Pickler) -> None:
    """Stores an object of any size; its number of pieces comes last, so that a reader sees all or nothing.

    Raises:
        Exception: of the pickler, which does not take the object; nothing is left in the store then.
    """
    writer = _Writer(store, key)
    try:
        make_pickler(writer).dump(value)
        writer.flush()
    except BaseException:
        store.delete([f"{key}/{index}" for index in range(writer.count)])
        raise
    store.set(key, str(writer.count).encode())


def get(store: StoreClient, key: str, timeout_s: float, *, once: bool = False) -> Any:
    """An object that ``put`` has stored. The store authenticates each of its clients by the secret of the call.

    Args:
        store: where.
        key: of the object.
        timeout_s: for its last piece to be there.
        once: whether nobody else will read it: each piece is deleted as soon as it is read.

    Raises:
        StoreTimeoutError: it is not there in time.
    """
    count = int(store.get(key, timeout_s))
    return pickle.load(io.BufferedReader(_Reader(store, key, count, once), _PIECE_BYTES))


class _Writer:
    """A file for a pickler, as far as that needs one; it writes values ``key/0``, ``key/1``, ..."""

    def __init__(self, store: StoreClient, key: str) -> None:
        self._store, self._key = store, key
        self._held = bytearray()
        self.count = 0

    def write(self, data: ReadableBuffer, /) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        while left:
            part = left[: _PIECE_BYTES - len(self._held)]
            self._held += part
            left = left[len(part) :]
            if len(self._held) == _PIECE_BYTES:
                self.flush()
        return size

    def flush(self) -> None:
        if self._held:
            self._store.set(f"{self._key}/{self.count}", bytes(self._held))
            self._held.clear()
            self.count += 1


class _Reader(io.RawIOBase):
    """A file for an unpickler that reads the values of a ``_Writer``."""

    def __init__(self, store: StoreClient, key: str, count: int, once: bool) -> None:
        self._store, self._once = store, once
        self._names = iter([f"{key}/{index}" for index in range(count)])
        self._held = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        into = memoryview(buffer).cast("B")
        if not self._held:
            name = next(self._names, None)
            if name is None:
                return 0
            self._held = memoryview(self._store.get(name, 0.0))
            if self._once:
                self._store.delete([name])
        size = min(len(into), len(self._held))
        into[:size] = self._held[:size]
        self._held = self._held[size:]
        return size
