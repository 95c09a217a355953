"""The timelines of all ranks, put into one file when their job is over (``--timeline-merge``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from horo.bootstrap.timeline_file import RANK_MARK, file_of_rank
from horo.config.hosts import ranges
from horo.runner.config import JobError, TimelineMerge
from horo.runner.job.json_report import check_file
from horo.timeline import TimelineError, merge

__all__ = ["run_and_merge"]

Stamp = tuple[int, int, int]


def run_and_merge(wanted: TimelineMerge, size: int, run: Callable[[], int], say: Callable[[str], None]) -> int:
    """Runs a job, then merges the timelines that its ranks have written where hororun runs. Blocks until that is done.

    A timeline that could not be merged is named in a sentence; the job's exit code stays as it is.

    Args:
        wanted: the timelines to merge, and the file for the result.
        size: number of ranks.
        run: runs the job; returns its exit code.
        say: prints a sentence for the user.

    Returns:
        The job's exit code.

    Raises:
        JobError: the result could not be written; before the job has started.
    """
    files = [file_of_rank(wanted.pattern, rank) or "" for rank in range(size)]
    _check(wanted.out, files)
    before = [_stamp(path) for path in files]
    code = run()
    written = [_stamp(path) not in (None, stamp) for path, stamp in zip(files, before, strict=True)]
    found = [path for path, is_new in zip(files, written, strict=True) if is_new]
    missing = [rank for rank, is_new in enumerate(written) if not is_new]
    try:
        for sentence in merge(wanted.out, found) if found else ():
            say(sentence)
    except TimelineError as error:
        say(f"--timeline-merge: {error}")
    except KeyboardInterrupt:
        say(f"--timeline-merge: interrupted; later: {_command(wanted)}")
        return code
    except Exception as error:  # the files may be anything, and the job's exit code must not be lost with them
        say(f"--timeline-merge: failed ({type(error).__name__}: {error}); later: {_command(wanted)}")
    if missing:
        say(_explain(missing, wanted))
    return code


def _check(out: str, files: Sequence[str]) -> None:
    """Whether the result can be written, without making it."""
    path = Path(out)
    if any(path.resolve() == Path(each).resolve() for each in files):
        raise JobError(f"--timeline-merge {out}: is the timeline of one rank; name another file for the result")
    check_file("--timeline-merge", out)


def _stamp(path: str) -> Stamp | None:
    """Another one for a file that has been written again; None: there is none."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _explain(missing: Sequence[int], wanted: TimelineMerge) -> str:
    """The reason why timelines are not in the result, and what to do."""
    who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {ranges(missing)} have"
    return (
        f"--timeline-merge: {who} not written {wanted.pattern} in the files of this host: where a rank has called "
        f"init() on a host with files of its own, copy its timeline from there, then {_command(wanted)}"
    )


def _command(wanted: TimelineMerge) -> str:
    return f"python -m horo.timeline merge {wanted.out} {wanted.pattern.replace(RANK_MARK, '*')}"
