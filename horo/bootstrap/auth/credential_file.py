"""A credential file in the user's home directory, for processes of the same user on hosts that share the home."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from pathlib import Path

from horo.errors import ResourceError

__all__ = ["CredentialFile"]

_FOLDER = ".horo"
_BYTES_MAX = 1 << 16


class CredentialFile:
    """The file of one start. Other users can read neither the file nor its folder.

    Args:
        name: unique name of the start.
        home: home directory of the user.
    """

    def __init__(self, name: str, home: Path) -> None:
        self._folder = home / _FOLDER
        self.path = self._folder / ("slurm-" + re.sub(r"[^A-Za-z0-9.-]", "_", name))

    def write(self, content: bytes) -> None:
        """Writes the file atomically; an older one is replaced.

        Raises:
            ResourceError: the home cannot be written, or the folder is open to others.
        """
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._check_folder()
            draft = self._folder / f".draft-{secrets.token_hex(8)}"
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                draft.rename(self.path)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise ResourceError(f"{self.path}: {error.strerror}") from error

    def read(self) -> bytes | None:
        """The content of the file; None while there is no file.

        Raises:
            ResourceError: others could have written it.
        """
        try:
            self._check_folder()
            os.listdir(self._folder)  # noqa: PTH208 - makes NFS discard a cached answer that there is no file
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            self._check(os.fstat(file.fileno()), self.path)
            return file.read(_BYTES_MAX)

    def remove(self) -> None:
        """Deletes the file; idempotent."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _check_folder(self) -> None:
        self._check(self._folder.lstat(), self._folder)

    def _check(self, status: os.stat_result, path: Path) -> None:
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.getuid() or mode & 0o077:
            raise ResourceError(
                f"{path} belongs to uid {status.st_uid} with mode {mode:o}, so others could read or change it; it must "
                "be yours alone: chmod 700 ~/.horo"
            )
