"""Proof that pickled bytes come from a rank of this job, checked before they are unpickled.

To unpickle is to run code. Links between hosts are authenticated when they are made, but carry no MAC afterwards: a
process between two hosts that can change packets could change an object. So objects carry HMAC-SHA256 over the
sending rank and the bytes. Its key is derived from the job's secret, the operation, its name and the headers that all
ranks exchange at the begin of the call. Each header has a fresh nonce: a MAC of another call is not valid in
this one, and no rank has to count calls.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Sequence

from horo.errors import MismatchError

__all__ = ["ObjectKey", "make_header"]

_MAC_BYTES = 32
_HEADER = struct.Struct("!16sQI")


def make_header(payload_bytes: int, root_rank: int) -> bytes:
    """A rank's header of a call: a fresh nonce, the number of bytes that it will seal, and the root."""
    return _HEADER.pack(secrets.token_bytes(16), payload_bytes, root_rank)


class ObjectKey:
    """Seals and opens the objects that ranks send in one call.

    Args:
        secret: The job's.
        what: The operation.
        name: The user's name of the call; None: an automatic one.
        rank: Of this process, in the job.
        ranks: Those that take part, in the job, ascending.
        header: Of this rank, as it was made.
        headers: Those of all these ranks as they were received, in this order.
    """

    def __init__(
        self,
        secret: bytes,
        what: str,
        name: str | None,
        *,
        rank: int,
        ranks: Sequence[int],
        header: bytes,
        headers: bytes,
    ) -> None:
        self.ranks = ranks
        """The ranks that take part."""
        place = ranks.index(rank) * _HEADER.size
        # This rank's own header, not the received one: somebody could have replaced it by that of an earlier call.
        self._headers = headers[:place] + header + headers[place + _HEADER.size :]
        self._what = what
        call = what if name is None else f"{what}.{name}"
        members = ",".join(map(str, ranks))
        context = f"{call}\0{members}\0".encode() + self._headers
        self._key = hmac.digest(secret, b"horo object\0" + context, "sha256")

    def sealed_bytes(self, rank: int) -> int:
        """The number of bytes that ``rank`` will send."""
        _, payload_bytes, _ = _HEADER.unpack_from(self._headers, self.ranks.index(rank) * _HEADER.size)
        return _MAC_BYTES + int(payload_bytes)

    def refuse_different_roots(self) -> None:
        """Compares the roots in the headers.

        Raises:
            MismatchError: They have named different roots.
        """
        roots = [root for _, _, root in _HEADER.iter_unpack(self._headers)]
        for rank, root in zip(self.ranks, roots, strict=True):
            if root != roots[0]:
                raise MismatchError(
                    f"{self._what}: root_rank is {roots[0]} on rank {self.ranks[0]}, but {root} on rank {rank}; "
                    "give the same one on all ranks"
                )

    def seal(self, rank: int, data: bytes) -> bytes:
        """The bytes that ``rank`` sends for ``data``."""
        return self._mac(rank, data) + data

    def open(self, rank: int, sealed: memoryview) -> memoryview:
        """The bytes that ``rank`` has sealed, at least one.

        Raises:
            MismatchError: These bytes were not sealed by it in this call.
        """
        data = sealed[_MAC_BYTES:]
        if len(data) == 0 or not hmac.compare_digest(sealed[:_MAC_BYTES], self._mac(rank, data)):
            raise MismatchError(
                f"{self._what}: the object of rank {rank} was not sent by it for this call: it was "
                "changed on the way, or stems from another call; it was not unpickled"
            )
        return data

    def _mac(self, rank: int, data: bytes | memoryview) -> bytes:
        mac = hmac.new(self._key, rank.to_bytes(4, "big"), "sha256")
        mac.update(data)
        return mac.digest()
