"""Objects in a store that only the caller and its ranks can reach: pickled, and cut into values of its size."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from horo._bootstrap.store.client import StoreClient

__all__ = ["CALL", "FAILURES", "Call", "Outcome", "get", "outcome_key", "put"]

_PIECE_BYTES = 4 << 20
CALL = "call"
"""The key of the function and its arguments."""
FAILURES = "failures"
"""The key at which failures are counted."""


class Call(NamedTuple):
    """What each rank does.

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
    """How the function ended in a rank.

    Attributes:
        result: what it returned, pickled; None: an exception ended it.
        error: the exception, pickled; None: it cannot be pickled, or there is none.
        text: the traceback as Python prints it.
        summary: the exception in one line.
        host: of the rank.
        order: number of this failure among those of all ranks; 0: it is none.
    """

    result: bytes | None
    error: bytes | None
    text: str
    summary: str
    host: str
    order: int


def outcome_key(rank: int) -> str:
    """The key of a rank's ``Outcome``."""
    return f"outcome/{rank}"


def put(store: StoreClient, key: str, value: Any) -> None:
    """Stores an object of any size; its number of pieces comes last, so that a reader sees all or nothing."""
    data = pickle.dumps(value)
    count = -(-len(data) // _PIECE_BYTES)
    for index in range(count):
        store.set(f"{key}/{index}", data[index * _PIECE_BYTES : (index + 1) * _PIECE_BYTES])
    store.set(key, str(count).encode())


def get(store: StoreClient, key: str, timeout_s: float, loads: Callable[[bytes], Any] | None = None) -> Any:
    """An object that ``put`` has stored. The store authenticates each of its clients by the secret of the call.

    Raises:
        StoreTimeoutError: it is not there in time.
    """
    count = int(store.get(key, timeout_s))
    pieces = (store.get(f"{key}/{index}", timeout_s) for index in range(count))
    return (loads or pickle.loads)(b"".join(pieces))
