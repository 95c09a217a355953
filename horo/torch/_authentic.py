"""Proof that pickled bytes come from a rank of this job, checked before they are unpickled.

To unpickle is to run code. Links between hosts are authenticated when they are made, but carry no MAC afterwards: a
process between two hosts that can change packets could change an object. So objects carry HMAC-SHA256 under a key that
is derived from the job's secret, over the start of the job, the operation and its name, how many objects have had that
name before, the rank that sends, and the bytes.
"""

from __future__ import annotations

import hmac

from horo.errors import MismatchError
from horo.torch._state import Session

__all__ = ["ObjectKey"]

_MAC_BYTES = 32


class ObjectKey:
    """Seals and opens what ranks send in one call; each rank makes one per call, in the same order for each name."""

    def __init__(self, session: Session, what: str, name: str | None) -> None:
        directory = session.job.directory
        call = f"horo object\0{directory.epoch}\0{what}\0{session.object_number(what, name)}\0{name or ''}"
        self._what = what
        self._key = hmac.digest(directory.secret, call.encode(), "sha256")

    def seal(self, rank: int, data: bytes) -> bytes:
        """The bytes that ``rank`` sends for ``data``."""
        return self._mac(rank, data) + data

    def open(self, rank: int, sealed: memoryview) -> memoryview:
        """What ``rank`` has sealed, at least one byte.

        Raises:
            MismatchError: These bytes were not sealed by it in this call.
        """
        data = sealed[_MAC_BYTES:]
        if len(data) == 0 or not hmac.compare_digest(sealed[:_MAC_BYTES], self._mac(rank, data)):
            raise MismatchError(
                f"{self._what}: what came as the object of rank {rank} was not sent by it for this call. Either it was "
                "changed on the way, or an earlier call of this name came about on some ranks only (then use another "
                "name); it was not unpickled"
            )
        return data

    def _mac(self, rank: int, data: bytes | memoryview) -> bytes:
        mac = hmac.new(self._key, rank.to_bytes(4, "big"), "sha256")
        mac.update(data)
        return mac.digest()
