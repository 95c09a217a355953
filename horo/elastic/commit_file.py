"""A commit in a file, which a later job goes on from.

The file is the user's own: its objects are unpickled, so one that somebody else could have written is refused. It is
written beside and renamed once it is on the disk, so it is always whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from horo.elastic.commits import LAYOUT_BYTES, Commit, Found
from horo.errors import ResourceError, UsageError
from horo.own_file import check_owner, open_own_file, refusal

__all__ = ["CommitFile"]

_MAGIC = b"horocmf1"
_HEAD = struct.Struct(f"<8sQQQ{LAYOUT_BYTES}s")
"""Magic, number of the commit, lengths of the data and of the objects, digest of the layout."""
_LOCK = "lock"
_DRAFT = f"commit.new.{socket.gethostname()}."
"""The begin of its name; the number of the process follows: a file system may have no locks."""
_DATA_AT = mmap.ALLOCATIONGRANULARITY
"""The objects follow the data."""


class CommitFile:
    """The latest commit of a training that ends and begins again, in a folder that all of its ranks see.

    Args:
        folder: Made if it is not there.

    Raises:
        ResourceError: It cannot be made or written to, or others may write there.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._path = self._folder / "commit"
        with self._in_words("cannot be used"):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_own(self._folder, self._folder.stat())
            os.close(open_own_file(self._folder / _LOCK))  # else the end of the job would show that it is read-only

    def __str__(self) -> str:
        return str(self._path)

    def write(self, found: Found) -> bool:
        """Makes it the commit in the file, unless that has one which is as late. One process at a time does so.

        Returns:
            Whether it was written.

        Raises:
            ResourceError: It cannot be written; the one before stays.
        """
        with self._in_words("cannot be written"), self._alone() as is_alone:
            if found.commit.number <= self._number():
                return False
            if is_alone:
                for left in self._folder.glob("commit.new.*"):  # of processes that were killed
                    left.unlink(missing_ok=True)
            draft = self._folder / f"{_DRAFT}{os.getpid()}"
            try:
                _write(draft, found)
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

        Raises:
            ResourceError: It cannot be read, or belongs to another user, or others may write to it.
            UsageError: Something else than ``write`` has made it.
        """
        with self._in_words("cannot be read"):
            try:
                fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            with os.fdopen(fd, "rb") as file:
                status = os.fstat(fd)
                _check_own(self._path, status)
                head = file.read(_HEAD.size)
                magic, number, data_bytes, object_bytes, layout = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
                if magic != _MAGIC or status.st_size != _DATA_AT + data_bytes + object_bytes:
                    raise UsageError(f"{self._path} is no file of commits; remove it, or name another --elastic-dir")
                file.seek(_DATA_AT + data_bytes)
                objects = file.read(object_bytes)
                whole = max(data_bytes + object_bytes, 1)
                data = mmap.mmap(fd, whole, flags=mmap.MAP_PRIVATE, offset=_DATA_AT)
        return Found(Commit(1, number), layout, objects, data, data_bytes)

    def _number(self) -> int:
        """The number of the commit in the file; -1: there is none."""
        try:
            with self._path.open("rb") as file:
                magic, number, *_ = _HEAD.unpack(file.read(_HEAD.size))
        except (FileNotFoundError, struct.error):
            return -1
        return int(number) if magic == _MAGIC else -1

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


def _write(path: Path, found: Found) -> None:
    with os.fdopen(open_own_file(path), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        head = _HEAD.pack(_MAGIC, found.commit.number, found.data_bytes, len(found.objects), found.layout)
        file.write(head.ljust(_DATA_AT, b"\0"))
        with memoryview(found.data) as data, data[: found.data_bytes] as part:
            file.write(part)
        file.write(found.objects)
        file.flush()
        os.fsync(file.fileno())


def _check_own(path: Path, status: os.stat_result) -> None:
    check_owner(path, status, "folder")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise refusal(path, "other users may write there; take that right away (chmod go-w)")
