"""Adds a MAC to every value in a store that authenticates no client, if the ranks share a secret.

The MAC is HMAC-SHA256 under a key derived from the secret and the store's address, over the key and the value. Keys
name the job, the start and the rank, so a value cannot be changed, nor moved to another rank, start, job or store; two
jobs may have one secret and one name. Counters have no MAC: a client without the secret can change them, delete keys
and withhold values, and so make a start fail, which ends with an error.

value with a secret     = 1 (u8) | MAC | bytes
value without a secret  = 0 (u8) | bytes
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Protocol

from horo.bootstrap.store.protocol import Store, StoreAbandonedError
from horo.errors import GroupError, MismatchError

__all__ = ["OpenStore", "of_another_start", "signed"]

_PLAIN = b"\x00"
_SIGNED = b"\x01"
_MAC_BYTES = 32


class OpenStore(Store, Protocol):
    """A store that authenticates no client."""

    @property
    def place(self) -> str:
        """Its address, as all ranks write it."""


class _Signed:
    """A ``protocol.Store`` that signs and verifies the values of another one."""

    def __init__(self, store: OpenStore, secret: bytes | None) -> None:
        self._store = store
        self._key = secret and hmac.digest(secret, b"horo store value\0" + store.place.encode(), "sha256")

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, self._sign(key, value))

    def get_many(self, keys: Sequence[str], timeout_s: float, unless: str | None = None) -> list[bytes]:
        try:
            values = self._store.get_many(keys, timeout_s, unless)
        except StoreAbandonedError as error:
            reason = error.value
        else:
            return [self._verify(key, value) for key, value in zip(keys, values, strict=True)]
        # Here, so that no traceback shows the bytes of one that is not signed well: anybody may have written them.
        raise StoreAbandonedError(self._verify(unless or "", reason))

    def get(self, key: str, timeout_s: float, unless: str | None = None) -> bytes:
        return self.get_many([key], timeout_s, unless)[0]

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def delete(self, keys: Sequence[str]) -> None:
        self._store.delete(keys)

    def set_on_disconnect(self, key: str, value: bytes | None) -> None:
        self._store.set_on_disconnect(key, None if value is None else self._sign(key, value))

    def close(self) -> None:
        self._store.close()

    def _sign(self, key: str, value: bytes) -> bytes:
        if self._key is None:
            return _PLAIN + value
        name = key.encode()
        return _SIGNED + hmac.digest(self._key, len(name).to_bytes(4, "big") + name + value, "sha256") + value

    def _verify(self, key: str, stored: bytes) -> bytes:
        head = len(_PLAIN) if self._key is None else len(_SIGNED) + _MAC_BYTES
        value = stored[head:]
        if hmac.compare_digest(self._sign(key, value), stored):
            return value
        if self._key is None and stored.startswith(_SIGNED):
            raise MismatchError(
                "HORO_SECRET is set on other nodes of this job, but not on this one; set it on all, to the same value"
            )
        raise of_another_start(key)


def of_another_start(key: str) -> GroupError:
    """The error about a value that no rank of this start has written."""
    return GroupError(
        f"the value of {key!r} in the store was not written by a rank of this start with this secret: is "
        "HORO_SECRET the same on all nodes, and set on all, and does MASTER_ADDR name the store in the same words "
        "everywhere? If so, somebody else writes to the store"
    )


def signed(store: OpenStore, secret: bytes | None) -> Store:
    """A view of ``store`` for ranks with this secret; None: a view without MACs, whose values can be forged.

    Raises (when a value is read):
        GroupError: the value was not written through ``signed`` under this key with this secret.
        MismatchError: the value was written with a secret, and this rank has none.
    """
    return _Signed(store, secret)
