"""Opens files for writing where others may have planted a link or a FIFO, in ``/tmp`` say."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

__all__ = ["check_owner", "is_script", "open_own_file", "refusal"]


def open_own_file(path: str | Path, *, folder: int | None = None, instead: str = "file") -> int:
    """A descriptor of the empty file. Nothing is emptied before it is known to be the user's own; nothing is followed.

    A file that is made here may have any owner: a file system may give it to another user, as NFS does with root's.

    Args:
        path: the file.
        folder: a descriptor of the folder that it lies in.
        instead: what a refusal advises to name.

    Raises:
        OSError: it cannot be made, or is not the user's own; its ``filename`` is the path.
    """
    path = Path(path)
    if is_script(path):
        raise refusal(path, f"it is a script, which would be replaced; name another {instead}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    name = path if folder is None else path.name
    try:
        with contextlib.suppress(FileExistsError):
            return os.open(name, flags | os.O_EXCL, 0o666, dir_fd=folder)
        fd = os.open(name, flags, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise refusal(path, f"it is a symbolic link; remove it or name another {instead}") from None
        if error.errno == errno.ENXIO:  # a FIFO that nobody reads, a socket
            raise refusal(path, f"it is no regular file; remove it or name another {instead}") from None
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise refusal(path, f"it is no regular file; remove it or name another {instead}")
        check_owner(path, status, instead)
        if status.st_nlink != 1:
            raise refusal(path, f"it has {status.st_nlink} names (hard links); remove it or name another {instead}")
        os.ftruncate(fd, 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def is_script(path: Path) -> bool:
    """It is a script: where the value of an option is forgotten, the name of the script is taken for the value."""
    return path.suffix in {".py", ".sh"} and path.exists()


def check_owner(path: Path, status: os.stat_result, instead: str) -> None:
    """Raises the refusal of what belongs to another user."""
    if status.st_uid != os.geteuid():
        raise refusal(path, f"it belongs to user {status.st_uid}, not to you; name another {instead}")


def refusal(path: Path, why: str) -> OSError:
    """The error about a file or folder that is left alone."""
    return PermissionError(errno.EPERM, why, str(path))
