"""The interface of the job's store. The implementation is horo's own store or torch's TCPStore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from horo.errors import GroupError, TimeoutError

__all__ = ["Store", "StoreAbandonedError", "StoreTimeoutError", "prefixed"]


class StoreTimeoutError(TimeoutError):
    """Keys did not appear in time; ``missing`` lists them."""

    def __init__(self, missing: Sequence[str]) -> None:
        super().__init__(f"not in the store in time: {', '.join(missing)}")
        self.missing = list(missing)


class StoreAbandonedError(GroupError):
    """The key given as ``unless`` appeared first; ``value`` is its value."""

    def __init__(self, value: bytes) -> None:
        super().__init__(value.decode("utf-8", "replace"))
        self.value = value


class Store(Protocol):
    """The operations of a store that the bootstrap needs. Implemented by ``StoreClient`` and ``TorchStore``."""

    def set(self, key: str, value: bytes) -> None:
        """Stores ``value``; an older one is replaced."""

    def get_many(self, keys: Sequence[str], timeout_s: float, unless: str | None = None) -> list[bytes]:
        """The values of all keys, in order, once all are there.

        Raises:
            StoreTimeoutError: some were not there after ``timeout_s``.
            StoreAbandonedError: the key ``unless`` was there first.
        """

    def get(self, key: str, timeout_s: float, unless: str | None = None) -> bytes:
        """``get_many`` of one key."""

    def add(self, key: str, amount: int) -> int:
        """Adds to an integer (0 at first) and returns the sum, in one indivisible step."""

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes keys; missing keys are ignored."""

    def set_on_disconnect(self, key: str, value: bytes | None) -> None:
        """Registers a value that the store sets if this client disconnects without ``close``; None: no value.

        A key that exists already keeps its value. Best effort: torch's store cannot detect a lost client, so there the
        launcher has to end a job whose rank died.
        """

    def close(self) -> None:
        """Closes the connection; the keys stay, and the value of ``set_on_disconnect`` is not set."""


class _Prefixed:
    """A view of a store in which every key begins with the same prefix."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._prefix + key, value)

    def get_many(self, keys: Sequence[str], timeout_s: float, unless: str | None = None) -> list[bytes]:
        abandon = None if unless is None else self._prefix + unless
        try:
            return self._store.get_many([self._prefix + key for key in keys], timeout_s, abandon)
        except StoreTimeoutError as error:
            raise StoreTimeoutError([key.removeprefix(self._prefix) for key in error.missing]) from None

    def get(self, key: str, timeout_s: float, unless: str | None = None) -> bytes:
        return self.get_many([key], timeout_s, unless)[0]

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._prefix + key, amount)

    def delete(self, keys: Sequence[str]) -> None:
        self._store.delete([self._prefix + key for key in keys])

    def set_on_disconnect(self, key: str, value: bytes | None) -> None:
        self._store.set_on_disconnect(self._prefix + key, value)

    def close(self) -> None:
        self._store.close()


def prefixed(store: Store, prefix: str) -> Store:
    """``store`` seen through a namespace: ``prefix`` is put before every key."""
    return _Prefixed(store, prefix)
