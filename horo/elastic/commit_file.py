"""A commit in a file, which a later job goes on from.

The file is the user's own: its objects are unpickled, so one that somebody else could have written is refused. It is
written beside and renamed once it is on the disk. Checksums find changes since then, by the disk or by whoever copies;
the commit before it, in a file of its own, is read then.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import socket
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from horo.elastic.commits import LAYOUT_BYTES, Commit, Found
from horo.errors import ResourceError, UsageError
from horo.own_file import check_owner, open_own_file, refusal

__all__ = ["CommitFile"]

_MAGIC, _VERSION = b"horocmf", b"2"
_HEAD = struct.Struct(f"<7ssQQQ{LAYOUT_BYTES}sI")
"""Magic, version, number of the commit, lengths of the data and of the objects, digest of the layout, checksum of the
data and objects."""
_CHECKSUM = struct.Struct("<I")
"""Of all before it: the last bytes before the data."""
_LOCK = "lock"
_DRAFT = f"commit.new.{socket.gethostname()}."
"""The begin of its name; the number of the process follows: a file system may have no locks."""
_DATA_AT = 1 << 16
"""A multiple of the pages of any machine. The objects follow the data."""


class _UnusableError(Exception):
    """Of a file: the words that follow its name, and its inode."""


class CommitFile:
    """The last two commits of a training that ends and begins again, in a folder that all of its ranks see.

    Args:
        folder: Made if it is not there.

    Raises:
        ResourceError: It cannot be made or written to, or others may write there.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._path = self._folder / "commit"
        self._before = self._folder / "commit.before"
        with self._in_words("cannot be used"):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_own(self._folder, self._folder.stat())
            os.close(open_own_file(self._folder / _LOCK))  # else the end of the job would show that it is read-only

    def __str__(self) -> str:
        return str(self._path)

    def write(self, found: Found, joined: Callable[[], Found | None] | None = None) -> bool:
        """Makes it the commit in the file, unless that has one which is as late. One process at a time does so.

        Args:
            found: The commit.
            joined: Called if it is to be written: gives it with all of its data, or None if they are gone.

        Returns:
            Whether it was written.

        Raises:
            ResourceError: It cannot be written; the one before stays.
        """
        with self._in_words("cannot be written"), self._alone() as is_alone:
            if found.commit.number <= max(map(_number, (self._path, self._before))):
                return False
            if is_alone:
                for left in self._folder.glob("commit.new.*"):  # of processes that were killed
                    left.unlink(missing_ok=True)
            draft = self._folder / f"{_DRAFT}{os.getpid()}"
            try:
                whole = found if joined is None else joined()
                if whole is None:
                    return False
                _write(draft, whole)
                if _number(self._path) >= 0:
                    self._path.replace(self._before)
                draft.replace(self._path)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
            return True

    def read(self) -> Found | None:
        """The commit in the file, of generation 1; None: there is no file.

        If the file is damaged, the commit before it; the file gets another name then.

        Raises:
            ResourceError: It cannot be read, or belongs to another user, or others may write to it.
            UsageError: It is damaged, or something else than ``write`` has made it, and there is no commit before.
        """
        with self._in_words("cannot be read"):
            try:
                found = _read(self._path)
            except _UnusableError as error:
                return self._instead_of(error)
            return found or _read_only(self._before)

    def _instead_of(self, damaged: _UnusableError) -> Found:
        """The commit before the latest one, whose file is put aside: else no commit with a smaller number is written.

        Raises:
            UsageError: That cannot be read either.
        """
        words, inode = damaged.args
        try:
            found = _read(self._before)
        except _UnusableError:
            found = None
        if found is None:
            raise _refused(self._path, words) from None
        aside = self._folder / "commit.damaged"
        with self._alone(), contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == inode:  # else another rank has done so
                self._path.replace(aside)
        logging.getLogger("horo").warning(
            "%s %s; commit %d in %s is read instead, and the file is %s now",
            *(self._path, words, found.commit.number, self._before.name, aside.name),
        )
        return found

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether the file system has locks; without them, the last rename counts."""
        with os.fdopen(open_own_file(self._folder / _LOCK), "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:
                is_alone = False
            else:
                is_alone = True
            yield is_alone

    @contextlib.contextmanager
    def _in_words(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ResourceError(f"the commit in {self._folder} (--elastic-dir) {what}: {error}") from None


def _refused(path: Path, words: str) -> UsageError:
    return UsageError(f"{path} {words}; remove it, or name another --elastic-dir")


def _read_only(path: Path) -> Found | None:
    """As ``_read``, where there is no other file."""
    try:
        return _read(path)
    except _UnusableError as error:
        raise _refused(path, error.args[0]) from None


def _read(path: Path) -> Found | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        _check_own(path, status)
        inode = status.st_ino
        number, data_bytes, object_bytes, layout, checksum = _unpacked(file.read(_DATA_AT), inode)
        whole = data_bytes + object_bytes
        if status.st_size != _DATA_AT + whole:
            raise _UnusableError(f"is damaged: it has {status.st_size} bytes instead of {_DATA_AT + whole}", inode)
        data = mmap.mmap(fd, max(whole, 1), flags=mmap.MAP_PRIVATE, offset=_DATA_AT)
        with memoryview(data) as all_bytes, all_bytes[:whole] as part:
            if zlib.crc32(part) != checksum:
                raise _UnusableError("is damaged: its data do not fit their checksum", inode)
    return Found(Commit(1, number), layout, data[data_bytes:whole], data, data_bytes)


def _unpacked(head: bytes, inode: int = 0) -> tuple[int, int, int, bytes, int]:
    """The fields behind the version.

    Raises:
        _UnusableError: It is no intact begin of a file.
    """
    if head and not head.startswith(_MAGIC):
        raise _UnusableError("is no file of commits", inode)
    version = head[len(_MAGIC) : len(_MAGIC) + 1]
    if version not in (b"", _VERSION):
        raise _UnusableError("is a file of commits of another version of horo", inode)
    if len(head) < _DATA_AT or zlib.crc32(head[: -_CHECKSUM.size]) != _CHECKSUM.unpack(head[-_CHECKSUM.size :])[0]:
        raise _UnusableError("is damaged in its first bytes", inode)
    _, _, number, data_bytes, object_bytes, layout, checksum = _HEAD.unpack_from(head)
    return number, data_bytes, object_bytes, layout, checksum


def _number(path: Path) -> int:
    """The number of the commit in a file; -1: there is none."""
    try:
        with path.open("rb") as file:
            return _unpacked(file.read(_DATA_AT))[0]
    except (FileNotFoundError, _UnusableError):
        return -1


def _write(path: Path, found: Found) -> None:
    with (
        os.fdopen(open_own_file(path), "wb") as file,
        memoryview(found.data) as data,
        data[: found.data_bytes] as part,
    ):
        os.fchmod(file.fileno(), 0o600)
        checksum = zlib.crc32(found.objects, zlib.crc32(part))
        sizes = found.data_bytes, len(found.objects)
        head = _HEAD.pack(_MAGIC, _VERSION, found.commit.number, *sizes, found.layout, checksum)
        head = head.ljust(_DATA_AT - _CHECKSUM.size, b"\0")
        file.write(head + _CHECKSUM.pack(zlib.crc32(head)))
        file.write(part)
        file.write(found.objects)
        file.flush()
        os.fsync(file.fileno())


def _check_own(path: Path, status: os.stat_result) -> None:
    check_owner(path, status, "folder")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise refusal(path, "other users may write there; take that right away (chmod go-w)")
