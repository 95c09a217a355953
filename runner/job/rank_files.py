"""The files of the ranks, ``--output-filename``: every byte that a rank writes.

Their folder may be one in which others can write, such as ``/tmp``. A link or a FIFO that another user plants there
must neither make hororun write into another file of its user, nor block it, nor give away the output of ranks.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from horo.own_file import check_owner, open_own_file, refusal
from horo.runner.config import EXIT_USAGE, JobError

__all__ = ["RankFiles", "explained", "make_folder"]

_FOLDER_MODE = 0o755  # less the umask: not writable by others, whatever the umask is


@contextlib.contextmanager
def explained(directory: str) -> Iterator[None]:
    """Raises JobError in place of an OSError about something below ``directory``."""
    try:
        yield
    except OSError as error:
        path = Path(error.filename or directory)
        file = next((each for each in (path, *path.parents) if each.exists() and not each.is_dir()), None)
        folder_is_file = isinstance(error, FileExistsError | NotADirectoryError) and file is not None
        fault = (
            f"{file} is a file, and a folder is needed: name another"
            if folder_is_file
            else f"cannot make {path}: {error.strerror}"
        )
        raise JobError(f"--output-filename {directory}: {fault}", EXIT_USAGE) from error


def make_folder(directory: str) -> None:
    """Makes the folder, and those that it lies in.

    Raises:
        JobError: that is not possible.
    """
    with explained(directory):
        Path(directory).mkdir(parents=True, exist_ok=True)


class RankFiles:
    """``DIR/rank.N/stdout`` and ``stderr`` for every rank, N padded with zeros; files that are there are replaced.

    Args:
        directory: DIR.
        hosts: of each rank; with ``named``, the folders are ``rank.N.HOST``.

    Raises:
        OSError: as ``add``.
    """

    def __init__(self, directory: str, hosts: Sequence[str], *, named: bool) -> None:
        self._fds: dict[tuple[int, int], int] = {}
        self._directory, self._named = directory, named
        self._width = len(str(len(hosts) - 1))
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.add(hosts)

    def add(self, hosts: Sequence[str]) -> None:
        """Opens the files of the ranks that have none yet; ``hosts``: of each rank.

        Raises:
            OSError: one cannot be made, or a file of that name is not the user's own; ``filename`` is its path.
        """
        for rank in range(len(self._fds) // 2, len(hosts)):
            path = Path(self._directory, f"rank.{rank:0{self._width}}{f'.{hosts[rank]}' if self._named else ''}")
            folder = _own_folder(path)
            try:
                for stream, name in ((1, "stdout"), (2, "stderr")):
                    self._fds[rank, stream] = open_own_file(path / name, folder=folder, instead="folder")
            finally:
                os.close(folder)

    def fd(self, rank: int, stream: int) -> int:
        """The descriptor for a stream of a rank."""
        return self._fds[rank, stream]

    def name_of(self, fd: int) -> str:
        """The stream that a descriptor is for, in words."""
        return next(
            (f"{'stdout' if s == 1 else 'stderr'} of rank {r}" for (r, s), f in self._fds.items() if f == fd), ""
        )


def _own_folder(path: Path) -> int:
    """A descriptor of the folder, which is made if need be."""
    if path.is_symlink():
        raise refusal(path, "it is a symbolic link; remove it or name another folder")
    path.mkdir(_FOLDER_MODE, exist_ok=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        check_owner(path, status, "folder")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise refusal(path, "others can write to it; 'chmod go-w' it or name another folder")
    except OSError:
        os.close(fd)
        raise
    return fd
