"""The last commit of a job that ends before its training, in a file from which a later job goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from horo.elastic import commits
from horo.elastic.commit_file import CommitFile
from horo.elastic.commits import CommitMemory
from horo.errors import GroupError, MismatchError, NotInitializedError, ResourceError
from horo.torch.elastic.state import TorchState

__all__ = ["Keeping"]


class Keeping:
    """The file of the commits of a state.

    Args:
        state: Has the commits.
        folder: Of the file.

    Raises:
        ResourceError: The folder cannot be made, or others may write there.
    """

    def __init__(self, state: TorchState, folder: str) -> None:
        self._state, self._file = state, CommitFile(folder)
        self._is_writing = False
        self._is_to_end = False
        """SIGTERM has come while it was writing."""

    def resume(self) -> bool:
        """Gives the state the commit in the file, if there is one; whether there is.

        Raises:
            ResourceError: The file cannot be read.
            UsageError: It is of another state.
        """
        return self._state._resume(self._file)

    def keep(self) -> None:
        """Writes the last commit to the file. A failure is a line in the log: the job ends in any case."""
        self._is_writing = True
        try:
            if self._state._copies.keep_in(self._file):
                number = self._state._standing.commit.number
                self._log(f"commit {number} is in {self._file}: a job with the same --elastic-dir goes on from it")
        except ResourceError as error:
            self._log(str(error))
        finally:
            self._is_writing = False

    def own_memory(self) -> None:
        """Has a commit that a signal breaks off leave the one before; so it is in an elastic job in any case."""
        self._state._adopt(CommitMemory(commits.create(), os.urandom(16)))

    @contextlib.contextmanager
    def at_the_end(self) -> Iterator[None]:
        """Writes the last commit when SIGTERM comes, or when the loss of a rank ends the job."""
        before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
        is_mine = threading.current_thread() is threading.main_thread() and before is not signal.SIG_IGN

        def end() -> None:
            signal.signal(signal.SIGTERM, before)
            os.kill(os.getpid(), signal.SIGTERM)

        def on_sigterm(number: int, frame: FrameType | None) -> None:
            if self._is_writing:  # on the stack below: it ends this process once it has written
                self._is_to_end = True
                return
            self.keep()
            end()

        if is_mine:
            signal.signal(signal.SIGTERM, on_sigterm)
        try:
            yield
        except (MismatchError, NotInitializedError):
            raise
        except GroupError:
            self.keep()
            if self._is_to_end:
                end()
            raise
        finally:
            if is_mine and signal.getsignal(signal.SIGTERM) is on_sigterm:
                signal.signal(signal.SIGTERM, before)

    def _log(self, line: str) -> None:
        logging.getLogger("horo").warning("%s", line)
