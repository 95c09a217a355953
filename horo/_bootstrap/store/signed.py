"""A store that authenticates no client, seen by ranks that share a secret: every value carries a MAC.

The MAC is HMAC-SHA256 under a key derived from the secret, over the key and the value. Keys name the job, the start and
the rank, so a value cannot be changed, nor moved to another rank, start or job. Counters have no MAC: a client without
the secret can change them, delete keys and withhold values, and so make a start fail, which ends with an error.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from horo._bootstrap.store.protocol import Store, StoreAbandonedError
from horo.errors import GroupError

__all__ = ["signed"]

_MAC_BYTES = 32


class _Signed:
    """``protocol.Store`` over another one."""

    def __init__(self, store: Store, secret: bytes) -> None:
        self._store = store
        self._key = hmac.digest(secret, b"horo store value\0", "sha256")

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, self._sign(key, value))

    def get_many(self, keys: Sequence[str], timeout_s: float, unless: str | None = None) -> list[bytes]:
        try:
            values = self._store.get_many(keys, timeout_s, unless)
        except StoreAbandonedError as error:
            raise StoreAbandonedError(self._verify(unless or "", error.value)) from None
        return [self._verify(key, value) for key, value in zip(keys, values, strict=True)]

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
        name = key.encode()
        return hmac.digest(self._key, len(name).to_bytes(4, "big") + name + value, "sha256") + value

    def _verify(self, key: str, signed_value: bytes) -> bytes:
        value = signed_value[_MAC_BYTES:]
        if not hmac.compare_digest(self._sign(key, value), signed_value):
            raise GroupError(
                f"the value of {key!r} in the store was not written by a rank of this job with this secret: is "
                "HORO_SECRET the same on all nodes? If it is, somebody else writes to the store"
            )
        return value


def signed(store: Store, secret: bytes) -> Store:
    """``store`` as ranks with this secret see it.

    Raises (when a value is read):
        GroupError: It was not written through ``signed`` under this key with this secret.
    """
    return _Signed(store, secret)
