"""Commits in memory that outlives the worker: a memfd, which the agent makes and the next worker of the slot inherits.

The first page has one record per slot. A commit goes into the slot that does not have the latest one: its record is
cleared, the data and the pickled objects are written, then the record. So a kill at any byte leaves the commit before
it whole: a record that is only partly there fails its checksum. The data need none: the kernel keeps all that a process
has written before its end, in that order.

The slots lie far apart in the file, which has memory only where something was written, so that each can grow. No memory
is allocated for a commit that is as large as those before it.

A further memfd, which all workers of a host inherit, can have what is equal on all of its ranks: each writes a share of
it there before its own record.
"""

from __future__ import annotations

import contextlib
import hmac
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from horo.errors import ResourceError
from horo.inherited import inherited, words_of

__all__ = ["Commit", "CommitMemory", "CommitShare", "CommonMemory", "Found", "create", "inherited", "words_of"]

_MAGIC = b"horocmt1"
_RECORD = struct.Struct("<8sQQQQQ32s32s")
"""Magic and the fields of ``_Record``; a checksum follows."""
_CHECKSUM = struct.Struct("<I")
_RECORD_SPACING = 512
_SLOT_SPACING = 1 << 40
_SLOTS = 2
_SHARE = struct.Struct("<QI32s")
"""Of one rank: the number of the write, from 1; the number of shares; the key. A checksum follows."""
_SHARE_SPACING = 64
_MOST_SHARES = 1 << 12
_GRAIN = 1 << 20
"""Slots grow by multiples of it."""
_ALIGNMENT = 64

LAYOUT_BYTES = 32
"""Of the digest of a layout."""


class Commit(NamedTuple):
    """A commit of the job. The greatest of several has the most training in it."""

    generation: int
    """The one in which it was made; 0: there has been no commit yet."""
    number: int
    """Counted from the beginning of the job."""


class Found(NamedTuple):
    """A commit as it was read."""

    commit: Commit
    layout: bytes
    """Digest of the names, shapes and dtypes of the tensors that the data are."""
    objects: bytes
    """Pickled by a worker that has the secret."""
    data: mmap.mmap
    """The data from its begin on; valid until the second commit from now."""
    data_bytes: int


class _Record(NamedTuple):
    sequence: int
    """The number of the write, from 1; the higher one of two is the later one, whatever their commits are."""
    commit: Commit
    data_bytes: int
    object_bytes: int
    layout: bytes
    mac: bytes
    """Of this record, with zeros here, and the objects."""


def create() -> int:
    """A descriptor of empty memory for the commits of one slot, closed by ``exec``.

    Raises:
        ResourceError: There is no descriptor or memory for it.
    """
    try:
        fd = os.memfd_create("horo-commits", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _SLOTS * (_SLOT_SPACING + _SHARE_SPACING * _MOST_SHARES))
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ResourceError(
            f"there is no memory for commits (memfd_create): {reason}; look at the limits of open files (ulimit -n) "
            "and of the size of a file (ulimit -f)"
        ) from error
    return fd


class _Slots:
    """A memory with two slots behind its records.

    Args:
        fd: From ``create``; closed by ``close``, or with this object.
        records: The bytes of the records, in whole pages.
    """

    def __init__(self, fd: int, records: int) -> None:
        self._fd = fd
        self._closer = weakref.finalize(self, os.close, fd)
        self._closer.atexit = False
        self._records = mmap.mmap(fd, records)
        self._maps: list[mmap.mmap | None] = [None] * _SLOTS

    def close(self) -> None:
        """Closes the descriptor. Data that were read stay valid."""
        self._records.close()
        self._maps = [None] * _SLOTS
        self._closer()

    def _map(self, slot: int, size: int) -> mmap.mmap:
        memory = self._maps[slot]
        if memory is None or len(memory) < size:
            try:
                memory = mmap.mmap(self._fd, _grown(size), offset=self._place(slot))
            except (OSError, ValueError) as error:
                raise ResourceError(f"a commit of {size} bytes cannot be mapped: {error}") from None
            self._maps[slot] = memory
        return memory

    def _place(self, slot: int) -> int:
        return len(self._records) + slot * _SLOT_SPACING


class CommitMemory(_Slots):
    """The commits of one worker, and of the one that had its slot before. For one thread at a time.

    Args:
        fd: From ``create``; closed by ``close``, or with this object.
        secret: The job's. Objects that somebody without it has written are as none.
        keeps_last: Whether a write that does not come to its end leaves the commit before it. Else it leaves none, and
            needs half the memory.
    """

    def __init__(self, fd: int, secret: bytes, *, keeps_last: bool = True) -> None:
        super().__init__(fd, mmap.PAGESIZE)
        self._key = hmac.digest(secret, b"horo commit", "sha256")
        self._slots = _SLOTS if keeps_last else 1
        self._ends: list[int | None] = [None] * _SLOTS
        """Of each slot, where its memory ends; None: an earlier process may have left any."""

    def whole(self) -> Iterator[Found]:
        """The whole commits, those first that were written last."""
        sequences = self._sequences()
        for slot in sorted(range(_SLOTS), key=sequences.__getitem__, reverse=True):
            found = self._read(slot)
            if found is not None:
                yield found

    def latest(self) -> Found | None:
        """The whole commit that was written last; None: there is none."""
        return next(self.whole(), None)

    def write(
        self, commit: Commit, layout: bytes, data_bytes: int, objects: bytes, fill: Callable[[mmap.mmap], None]
    ) -> None:
        """Makes a commit the latest one.

        Args:
            commit: Any.
            layout: Digest of the layout of the data, of ``LAYOUT_BYTES``.
            data_bytes: The length of the data.
            objects: Pickled objects.
            fill: Writes the data to the begin of a memory of at least that length. The memory is one of two, each the
                same object from call to call while it is large enough.

        Raises:
            ResourceError: There is not enough address space.
        """
        sequences = self._sequences()
        slot = sequences.index(min(sequences[: self._slots]))
        objects_at = _aligned(data_bytes)
        memory = self._map(slot, objects_at + len(objects))
        self._set_record(slot, bytes(_RECORD.size + _CHECKSUM.size))
        fill(memory)
        memory[objects_at : objects_at + len(objects)] = objects
        head = _Record(max(sequences) + 1, commit, data_bytes, len(objects), layout, b"")
        self._set_record(slot, _checked(_pack(head._replace(mac=self._mac(head, objects)))))
        self._give_back(slot, _grown(objects_at + len(objects)))

    def _sequences(self) -> list[int]:
        """The number of the write in each slot; 0: it has none that is whole."""
        return [0 if record is None else record.sequence for record in map(self._record, range(_SLOTS))]

    def _set_record(self, slot: int, value: bytes) -> None:
        begin = slot * _RECORD_SPACING
        self._records[begin : begin + len(value)] = value

    def _record(self, slot: int) -> _Record | None:
        begin = slot * _RECORD_SPACING
        end = begin + _RECORD.size
        packed = self._records[begin:end]
        magic, sequence, generation, number, data_bytes, object_bytes, layout, mac = _RECORD.unpack(packed)
        is_whole = _checked(packed) == self._records[begin : end + _CHECKSUM.size]
        if magic != _MAGIC or not is_whole or data_bytes + object_bytes >= _SLOT_SPACING // 2:
            return None
        return _Record(sequence, Commit(generation, number), data_bytes, object_bytes, layout, mac)

    def _read(self, slot: int) -> Found | None:
        record = self._record(slot)
        if record is None:
            return None
        begin = _aligned(record.data_bytes)
        memory = self._map(slot, begin + record.object_bytes)
        objects = memory[begin : begin + record.object_bytes]
        if not hmac.compare_digest(record.mac, self._mac(record, objects)):
            return None
        return Found(record.commit, record.layout, objects, memory, record.data_bytes)

    def _mac(self, record: _Record, objects: bytes) -> bytes:
        return hmac.digest(self._key, _pack(record._replace(mac=bytes(32))) + objects, "sha256")

    def _give_back(self, slot: int, end: int) -> None:
        """Gives back the memory that larger commits have left in a slot."""
        before, self._ends[slot] = self._ends[slot], end
        if before is None or before > end:
            with (
                contextlib.suppress(OSError, ValueError),  # it stays, and nothing else is wrong
                mmap.mmap(self._fd, _SLOT_SPACING - end, offset=self._place(slot) + end) as rest,
            ):
                rest.madvise(mmap.MADV_REMOVE)


@dataclass(frozen=True)
class CommitShare:
    """The part of one rank in what all ranks of a host write together."""

    index: int
    count: int
    """The number of ranks."""
    generation: int
    """The one in which they do."""


class CommonMemory(_Slots):
    """The part of the commits of a host that is equal on all of its ranks, each of which writes a share of it.

    A rank that begins a commit knows that all others have finished the one before. So one commit is always whole, and
    all ranks find the same one: the next one goes into the other slot. Readers need no lock: if ``find`` gives the same
    memory again behind a look at it, that has not changed.

    Args:
        fd: From ``create``; closed by ``close``, or with this object.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd, _SLOTS * _SHARE_SPACING * _MOST_SHARES)
        self.identity = os.fstat(fd).st_ino
        """Equal for all workers of an agent, and no others."""

    def write(self, key: bytes, share: CommitShare, size: int, fill: Callable[[mmap.mmap], None]) -> None:
        """Writes a share of a commit, which is whole when all ranks have.

        Args:
            key: Of 32 bytes; equal on all ranks, and on no other commit.
            share: That of this rank.
            size: Of the whole data.
            fill: Writes the share into a memory of at least that length, which begins as the data do.

        Raises:
            ResourceError: There is not enough address space, or there are too many ranks.
        """
        if share.count > _MOST_SHARES:
            raise ResourceError(f"a host has {share.count} ranks; sharding= is for up to {_MOST_SHARES} there")
        found = map(self._whole, range(_SLOTS))
        sequences = [0 if known == key else sequence for sequence, known in found]  # a try before has left that one
        latest = max(sequences)
        slot = 1 if latest and sequences[0] == latest else 0
        memory = self._map(slot, size)
        self._set_share(slot, share.index, bytes(_SHARE.size + _CHECKSUM.size))
        fill(memory)
        self._set_share(slot, share.index, _checked(_SHARE.pack(latest + 1, share.count, key)))

    def find(self, key: bytes, size: int) -> mmap.mmap | None:
        """The data of a commit, of which all shares are there; None: they are not, or no longer."""
        for slot in range(_SLOTS):
            if self._whole(slot)[1] == key:
                return self._map(slot, size)
        return None

    def _whole(self, slot: int) -> tuple[int, bytes]:
        """The number of the write of a whole commit and its key; 0: there is none."""
        first = self._share(slot, 0)
        sequence, count, key = _SHARE.unpack(first[: _SHARE.size])
        is_whole = first == _checked(first[: _SHARE.size]) and 0 < count <= _MOST_SHARES
        if not is_whole or any(self._share(slot, index) != first for index in range(1, count)):
            return 0, b""
        return sequence, key

    def _share(self, slot: int, index: int) -> bytes:
        begin = (slot * _MOST_SHARES + index) * _SHARE_SPACING
        return self._records[begin : begin + _SHARE.size + _CHECKSUM.size]

    def _set_share(self, slot: int, index: int, value: bytes) -> None:
        begin = (slot * _MOST_SHARES + index) * _SHARE_SPACING
        self._records[begin : begin + len(value)] = value


def _checked(packed: bytes) -> bytes:
    """A record with its checksum: one that is only partly there has another."""
    return packed + _CHECKSUM.pack(zlib.crc32(packed))


def _grown(size: int) -> int:
    return -(-max(size, 1) // _GRAIN) * _GRAIN


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _pack(record: _Record) -> bytes:
    sequence, commit, *others = record
    return _RECORD.pack(_MAGIC, sequence, *commit, *others)
