"""Proof that pickled bytes come from a rank of this job, checked before they are unpickled.

To unpickle is to run code. Links between hosts are authenticated when they are made, but carry no MAC afterwards: a
process between two hosts that can change packets could change an object. So objects carry HMAC-SHA256 under a key that
is derived from the job's secret, over the operation, its name, what all ranks have said at the begin of the call, the
rank that sends, and the bytes. Each rank says a fresh nonce: what was sealed in another call fits no key of this one,
and no rank has to count calls.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Sequence

from horo.errors import MismatchError

__all__ = ["ObjectKey", "make_greeting"]

_MAC_BYTES = 32
_GREETING = struct.Struct("!16sQI")


def make_greeting(payload_bytes: int, root_rank: int) -> bytes:
    """What a rank says at the begin of a call: a fresh nonce, how many bytes it will seal, and whose object all get."""
    return _GREETING.pack(secrets.token_bytes(16), payload_bytes, root_rank)


class ObjectKey:
    """Seals and opens what ranks send in one call.

    Args:
        secret: The job's.
        what: The operation.
        name: The user's name of the call; None: an automatic one.
        rank: Of this process, in the job.
        ranks: Those that take part, in the job, ascending.
        greeting: What this rank has said.
        greetings: What came as the greetings of these ranks, in this order.
    """

    def __init__(
        self,
        secret: bytes,
        what: str,
        name: str | None,
        *,
        rank: int,
        ranks: Sequence[int],
        greeting: bytes,
        greetings: bytes,
    ) -> None:
        self._ranks = ranks
        place = ranks.index(rank) * _GREETING.size
        # Not what came back as this rank's greeting: the nonce of an earlier call could have been put in its place.
        self._greetings = greetings[:place] + greeting + greetings[place + _GREETING.size :]
        self._what = what
        call = what if name is None else f"{what}.{name}"
        members = ",".join(map(str, ranks))
        said = f"{call}\0{members}\0".encode() + self._greetings
        self._key = hmac.digest(secret, b"horo object\0" + said, "sha256")

    def sealed_bytes(self, rank: int) -> int:
        """How many bytes ``rank`` will send."""
        _, payload_bytes, _ = _GREETING.unpack_from(self._greetings, self._ranks.index(rank) * _GREETING.size)
        return _MAC_BYTES + int(payload_bytes)

    def refuse_different_roots(self) -> None:
        """Compares what all ranks have said.

        Raises:
            MismatchError: They have named different roots.
        """
        roots = [root for _, _, root in _GREETING.iter_unpack(self._greetings)]
        for rank, root in zip(self._ranks, roots, strict=True):
            if root != roots[0]:
                raise MismatchError(
                    f"{self._what}: root_rank is {roots[0]} on rank {self._ranks[0]}, but {root} on rank {rank}; "
                    "give the same one on all ranks"
                )

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
                f"{self._what}: what came as the object of rank {rank} was not sent by it for this call: it was "
                "changed on the way, or stems from another call; it was not unpickled"
            )
        return data

    def _mac(self, rank: int, data: bytes | memoryview) -> bytes:
        mac = hmac.new(self._key, rank.to_bytes(4, "big"), "sha256")
        mac.update(data)
        return mac.digest()
