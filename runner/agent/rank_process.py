"""The process of a rank, with its pipe for notes and the page of its counts."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from horo.diagnostics import page
from horo.inherited import words_of
from horo.runner.agent.rank_reports import PIPE_NAME, open_pipe
from horo.runner.processes import spawn

__all__ = ["RankProcess", "spawn_rank"]


class RankProcess(NamedTuple):
    """A rank that runs.

    Attributes:
        process: with pipes for its output.
        notes: the read end of its pipe for notes; None: it has none.
        page: of its counts; None: it has none.
    """

    process: subprocess.Popen[bytes]
    notes: int | None
    page: int | None


def spawn_rank(
    argv: Sequence[str],
    environment: Mapping[str, str],
    cwd: str,
    cpus: Collection[int],
    *,
    with_notes: bool,
    pass_fds: Sequence[int],
) -> RankProcess:
    """Starts a rank.

    Args:
        argv: its command.
        environment: of its process.
        cwd: where it starts.
        cpus: that it is bound to; none: it may run where this process may.
        with_notes: it gets a pipe for notes, and a page for its counts where there is memory for it.
        pass_fds: descriptors that it inherits, under the same numbers.

    Raises:
        OSError: it cannot be started.
        ValueError: a word has a NUL byte.
    """
    if not with_notes:
        return RankProcess(spawn(argv, environment=environment, cwd=cwd, pass_fds=pass_fds, cpus=cpus), None, None)
    read_fd, write_fd, name = open_pipe()
    environment = {**environment, PIPE_NAME: name}
    inherited, counts = [write_fd, *pass_fds], None
    with contextlib.suppress(OSError):
        counts = page.create()
        inherited.append(counts)
        environment[page.PAGE_NAME] = words_of(counts)
    try:
        process = spawn(argv, environment=environment, cwd=cwd, pass_fds=inherited, cpus=cpus)
    except BaseException:
        os.close(read_fd)
        if counts is not None:
            os.close(counts)
        raise
    finally:
        os.close(write_fd)
    return RankProcess(process, read_fd, counts)
