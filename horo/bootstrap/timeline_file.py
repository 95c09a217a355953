"""The file that a rank's timeline is written to, and the description of the rank in it."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horo.bootstrap.host.identity import read_identity
from horo.config.table import Config, variables_of
from horo.errors import HoroError

if TYPE_CHECKING:
    from horo.bootstrap.running_rank import RunningRank

__all__ = [
    "DYNAMIC",
    "RANK_MARK",
    "begin_timeline",
    "file_of_rank",
    "file_of_start",
    "start_timeline",
]

DYNAMIC = "DYNAMIC"
"""Horovod's word instead of a path: nothing is written before ``start_timeline()``."""
RANK_MARK = "{rank}"
_TIME_NAMESPACE = Path("/proc/self/ns/time")
_starts: Counter[str] = Counter()
"""The number of timelines begun by this process because of the variable, by path: no file replaces another."""


def file_of_rank(path: str, rank: int) -> str | None:
    """The path with ``{rank}`` replaced; None: this rank writes no timeline, since there is one path and rank 0's."""
    if RANK_MARK in path:
        return path.replace(RANK_MARK, str(rank))
    return path if rank == 0 else None


def file_of_start(path: str, number: int) -> str:
    """The path for the ``number``-th start of a process: ``t.json``, ``t.2.json``, ``t.3.json``."""
    if number == 1:
        return path
    whole = Path(path)
    return str(whole.with_name(f"{whole.stem}.{number}{whole.suffix}"))


def start_timeline(job: RunningRank, path: str, *, marks_cycles: bool) -> None:
    """Starts the timeline of a rank, if it is to write one, as ``Context.start_timeline``, and sends nothing.

    Raises:
        UsageError: the file cannot be written.
    """
    path = os.path.abspath(path)  # noqa: PTH100 - links stay as they are
    file = file_of_rank(path, job.rank)
    if file is not None:
        job.context.start_timeline(file, _describe(job), marks_batches=marks_cycles)
        job.reporter.writes_timeline(file)
        logging.getLogger("horo").info("writes a timeline to %s", file)
    job.timelines |= {(rank, each) for rank in job.host_ranks if (each := file_of_rank(path, rank)) is not None}


def begin_timeline(job: RunningRank, config: Config) -> None:
    """Starts the timeline that the environment asks for. If that fails, the rank leaves the job.

    Raises:
        UsageError: the file cannot be written; names the variable.
        ResourceError: no thread can be started; likewise.
    """
    path = config.timeline
    if path is None or path == DYNAMIC:
        return
    _starts[path] += 1
    try:
        start_timeline(job, file_of_start(path, _starts[path]), marks_cycles=config.timeline_mark_cycles)
    except HoroError as error:
        job.close()
        raise type(error)(f"{variables_of(Config)['timeline'].names[0]}: {error}") from None
    except BaseException:
        job.close()
        raise


def _describe(job: RunningRank) -> dict[str, Any]:
    """Facts about the rank that ``python -m horo.timeline merge`` reads."""
    return {"size": job.size, "host": job.host_names[job.rank], "clock": _clock()}


def _clock() -> str:
    """Equal for processes whose monotonic clocks are the same; not the machine's own id."""
    try:
        namespace = _TIME_NAMESPACE.stat().st_ino
    except OSError:
        namespace = 0
    return hashlib.sha256(f"{read_identity(None).boot_id} {namespace}".encode()).hexdigest()[:16]
