"""hororun's own text on stdout, and the sentence for a stdout that takes no more."""

from __future__ import annotations

import errno
import os
import signal
import sys

from horo.runner.config import EXIT_SETUP, JobError

__all__ = ["explain_stdout", "show"]


def show(text: str, end: str = "\n") -> None:
    """Writes text to stdout, at once.

    Raises:
        JobError: it cannot be written.
    """
    if sys.stdout is None:
        raise JobError("stdout is closed, where the output goes", EXIT_SETUP)
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes what is left when it ends
        raise explain_stdout(error) from None


def explain_stdout(error: OSError) -> JobError:
    """The sentence about a stdout that takes no more."""
    if error.errno == errno.EPIPE:
        return JobError("nobody reads stdout any more", 128 + signal.SIGPIPE)
    return JobError(f"stdout cannot be written: {error.strerror}", EXIT_SETUP)
