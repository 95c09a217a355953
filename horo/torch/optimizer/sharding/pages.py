"""Memory of all ranks of a host, mapped twice: privately for the script, and shared for the owner's step.

Writes through the shared mapping, the *alias*, show in all private ones, the *views*. Writes of a script into its view
are its own: the kernel copies the page. Such pages hide later writes of owners, so they are found and dropped before an
owner writes again.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator

import torch

from horo.errors import ResourceError, UnsupportedError

__all__ = ["PAGE", "Pages", "rounded"]

PAGE = mmap.PAGESIZE
_MOST_RANGES = 1024
# struct pm_scan_arg of linux/fs.h, from Linux 6.7 on
_SCAN_WORDS = 12
_PAGEMAP_SCAN = 3 << 30 | (8 * _SCAN_WORDS) << 16 | ord("f") << 8 | 16
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_FILE_BIT = 61  # of a word of /proc/self/pagemap; swapped and present are above it


class Pages:
    """A part of a file, mapped twice. Both mappings last as long as a tensor in them.

    Args:
        descriptor: Of the file, which is at least as long.
        offset: Where the part begins, at a page.
        size: Its bytes, whole pages.

    Raises:
        ResourceError: They cannot be mapped.
        UnsupportedError: The process locks its memory, or the kernel does not tell which pages are private.
    """

    def __init__(self, descriptor: int, offset: int, size: int) -> None:
        both = mmap.PROT_READ | mmap.PROT_WRITE
        self.size = size
        try:
            self.view = mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, both, offset=offset)
            self.alias = mmap.mmap(descriptor, size, mmap.MAP_SHARED, both, offset=offset)
        except (OSError, ValueError) as error:
            raise ResourceError(f"{size} bytes of shared memory cannot be mapped: {error}") from error
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        self._found = (ctypes.c_uint64 * (3 * _MOST_RANGES))()
        if next(self.written(), None) is not None:
            raise _locked()

    def storage(self, offset: int, size: int, *, alias: bool) -> torch.UntypedStorage:
        """A part of a mapping, which is no part of a larger storage."""
        memory = self.alias if alias else self.view
        return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset).untyped_storage()

    def written(self) -> Iterator[tuple[int, int]]:
        """Start and end of each range of the view that this process has written, in bytes.

        Raises:
            UnsupportedError: The kernel does not tell.
        """
        start, end = self._address, self._address + self.size
        while start < end:
            start, ranges = self._scan(start, end)
            for first, last in ranges:
                yield first - self._address, last - self._address

    def drop(self, start: int, end: int) -> None:
        """Drops what this process has written into a range of its view, which shows the file again.

        Raises:
            UnsupportedError: The process has locked its memory since.
        """
        try:
            self.view.madvise(mmap.MADV_DONTNEED, start, end - start)
        except OSError as error:
            raise _locked() from error

    def _scan(self, start: int, end: int) -> tuple[int, list[tuple[int, int]]]:
        """The address where the scan has ended, and the ranges found until there."""
        words = (ctypes.c_uint64 * _SCAN_WORDS)(
            *(8 * _SCAN_WORDS, 0, start, end, 0, ctypes.addressof(self._found), _MOST_RANGES, 0),
            *(_IS_FILE, _IS_FILE, _IS_PRESENT | _IS_SWAPPED, _IS_PRESENT),
        )
        descriptor = _open_pagemap()
        try:
            count = fcntl.ioctl(descriptor, _PAGEMAP_SCAN, words, True)
        except OSError:  # an older kernel
            return end, list(_read_pagemap(descriptor, start, end))
        finally:
            os.close(descriptor)
        return words[4], [(self._found[3 * index], self._found[3 * index + 1]) for index in range(count)]


def rounded(size: int) -> int:
    """The bytes of whole pages."""
    return -(-size // PAGE) * PAGE


def _open_pagemap() -> int:
    try:
        return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _no_pagemap(error) from error


def _read_pagemap(descriptor: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The same by the 64 bits that every kernel has for each page."""
    count = (end - start) // PAGE
    try:
        data = os.pread(descriptor, 8 * count, 8 * (start // PAGE))
    except OSError as error:
        raise _no_pagemap(error) from error
    if len(data) < 8 * count:
        raise _no_pagemap("it is too short")
    words = torch.frombuffer(bytearray(data), dtype=torch.int64)
    is_private = (words >> _FILE_BIT & 1 == 0) & (words >> _FILE_BIT + 1 & 3 != 0)
    for page in is_private.nonzero().flatten().tolist():
        yield start + page * PAGE, start + (page + 1) * PAGE


def _locked() -> UnsupportedError:
    return UnsupportedError(
        "sharding=: this process locks its memory (mlockall), which makes a private copy of every parameter"
    )


def _no_pagemap(reason: object) -> UnsupportedError:
    return UnsupportedError(
        f"sharding=: changes of parameters outside step() cannot be found here, as /proc/self/pagemap is not readable "
        f"({reason}); leave sharding out"
    )
