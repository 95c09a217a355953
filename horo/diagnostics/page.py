"""The counts of one rank in a page of memory that it shares with the agent of its host, which reads it at any time.

The agent makes the page, a memfd without a name, and the rank inherits it. The rank writes the page once per step and
tells nobody; the page outlives it, also where it is killed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import struct

from horo.inherited import inherited

__all__ = ["PAGE_NAME", "SAMPLES_MAX", "Page", "create", "owner", "read"]

PAGE_NAME = "HORO_COUNTS_FD"
SAMPLES_MAX = 1024
_MAGIC = 0x31746E634F524F48
_ABOUT = ("pid", "size", "cores", "ranks_here")
_SUMS = ("steps", "measured", "ns", "waiting", "moving", "loading", "bytes", "tensors", "batches")
_FIRST = struct.Struct(f"<Q16s{len(_ABOUT)}Q")
"""Magic, the way between ranks, and what does not change."""
_WITHIN = struct.Struct("<Q")
_COUNTS = struct.Struct(f"<{len(_SUMS)}q")
"""Signed: the core may correct by a little what it has measured."""
_NUMBER = struct.Struct("<Q")
_WITHIN_AT = _FIRST.size
_COUNTS_AT = _WITHIN_AT + _WITHIN.size
_NUMBER_AT = _COUNTS_AT + _COUNTS.size
_PEAK_AT = _NUMBER_AT + _NUMBER.size
_SAMPLES_AT = 256
_SAMPLE = struct.Struct("<III")
_BYTES = _SAMPLES_AT + SAMPLES_MAX * _SAMPLE.size
_TRIES = 3
_PEAK_MAX = 1 << 60
_U32 = (1 << 32) - 1


class Page:
    """Written by its rank: for one thread at a time.

    Args:
        words: the value of ``HORO_COUNTS_FD``; None, or a descriptor that is not there: memory of this process alone.
    """

    _owner: Page | None = None
    """The one of this process that writes what the agent reads."""

    def __init__(self, words: str | None = None) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(_BYTES)
        self._samples = 0
        fd = inherited(words) if Page._owner is None else None
        if fd is not None:
            with contextlib.suppress(OSError, ValueError):
                self._memory = mmap.mmap(fd, _BYTES)
                Page._owner = self

    def begin(self, *, size: int, cores: int, ranks_here: int, via: str) -> None:
        """Writes what does not change: of the job, and of this host; forgets the steps of an earlier job."""
        self._memory[:] = bytes(_BYTES)
        self._samples = 0
        _FIRST.pack_into(self._memory, 0, _MAGIC, via.encode()[:16], os.getpid(), size, cores, ranks_here)

    def step_begins(self, number: int) -> None:
        """This rank is in a step."""
        _WITHIN.pack_into(self._memory, _WITHIN_AT, number)

    def step_ends(self, *sums: int) -> None:
        """It has done one: the sums over all, as ``read`` gives them. It is in no step now."""
        _COUNTS.pack_into(self._memory, _COUNTS_AT, *sums)
        _NUMBER.pack_into(self._memory, _PEAK_AT, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        _WITHIN.pack_into(self._memory, _WITHIN_AT, 0)

    def add_sample(self, number: int, waiting_us: int, loading_us: int) -> bool:
        """Of a step; whether there is room for no other."""
        at = _SAMPLES_AT + self._samples * _SAMPLE.size
        _SAMPLE.pack_into(self._memory, at, number & _U32, min(waiting_us, _U32), min(loading_us, _U32))
        self._samples += 1
        _NUMBER.pack_into(self._memory, _NUMBER_AT, self._samples)
        return self._samples == SAMPLES_MAX

    def thin_out(self, stride: int) -> None:
        """Keeps the samples of steps whose numbers are multiples of ``stride``."""
        kept = [each for each in self.samples() if each[0] % stride == 0]
        self._samples = 0
        for each in kept:
            self.add_sample(*each)

    def samples(self) -> list[tuple[int, int, int]]:
        """Number, waiting and loading of each, in microseconds."""
        return _samples_in(self._memory, self._samples)

    def close(self) -> None:
        """Its rank has told the sums in another way: empties the page, which another job of the process may take."""
        self._memory[:] = bytes(_BYTES)
        if Page._owner is self:
            Page._owner = None


def _samples_in(memory: mmap.mmap | bytearray | bytes, count: int) -> list[tuple[int, int, int]]:
    end = _SAMPLES_AT + count * _SAMPLE.size
    return list(_SAMPLE.iter_unpack(memory[_SAMPLES_AT:end]))


def create() -> int:
    """A descriptor of an empty page, closed by ``exec``.

    Raises:
        OSError: there is no descriptor or memory for it.
    """
    fd = os.memfd_create("horo-counts", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, _BYTES)
    except OSError:
        os.close(fd)
        raise
    return fd


def owner(fd: int) -> int:
    """The process that counts in the page behind a descriptor; 0: none does."""
    data = os.pread(fd, _FIRST.size, 0)
    if len(data) < _FIRST.size:
        return 0
    magic, _, pid, *_ = _FIRST.unpack(data)
    return pid if magic == _MAGIC and pid < 1 << 31 else 0


def read(fd: int, *, with_samples: bool = True) -> dict[str, object] | None:
    """The page behind a descriptor as the summary of a rank, with its ``pid``; None: no step has been counted.

    The rank may write it meanwhile, which is noticed; any program that has inherited it may have written anything.
    """
    data = b""
    for _ in range(_TRIES):
        before, data = data, os.pread(fd, _BYTES if with_samples else _SAMPLES_AT, 0)
        if data == before:
            break
    if len(data) < _SAMPLES_AT:
        return None
    magic, via, *about = _FIRST.unpack_from(data)
    (within,) = _WITHIN.unpack_from(data, _WITHIN_AT)
    sums = [max(0, each) for each in _COUNTS.unpack_from(data, _COUNTS_AT)]
    if magic != _MAGIC or not (within or sums[0]):
        return None
    number = min(_NUMBER.unpack_from(data, _NUMBER_AT)[0], SAMPLES_MAX) if with_samples else 0
    rows = _samples_in(data, number)
    return {
        **dict(zip(_ABOUT, about, strict=True)),
        **dict(zip(_SUMS, sums, strict=True)),
        "within": within,
        "samples": [[row[column] for row in rows] for column in range(3)],
        "via": via.rstrip(b"\0").decode("ascii", "replace"),
        "peak": min(_NUMBER.unpack_from(data, _PEAK_AT)[0], _PEAK_MAX),
        "gpu_peak": 0,
        "on_cpu": 0,
        "unused": [],
    }
