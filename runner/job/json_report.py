"""The course of a job as JSON (``--json-report``), written when it is over: whole, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from horo.own_file import is_script, open_own_file
from horo.runner.config import Job, JobError
from horo.runner.job.report import Ending, how_it_failed, signal_name
from horo.version import __version__

__all__ = ["check_file", "check_report", "report_of", "write_report"]

_FORMAT = 1
_OPTION = "--json-report"


def report_of(
    job: Job,
    word: str,
    endings: Sequence[Ending],
    *,
    cause: Ending | None,
    code: int,
    number: int,
    told: Sequence[str],
    began_s: float,
    seconds: float,
    training: Mapping[str, Any],
) -> dict[str, Any]:
    """The values that every job has.

    Args:
        job: that is over.
        word: the name for a process and its number.
        endings: of its processes, in the order they became known.
        cause: the one that has ended the job; None: none has.
        code: hororun's exit code.
        number: the signal that has ended the job; 0: none has.
        told: sentences on why hororun itself has ended the job.
        began_s: the time of its begin, from ``time.time()``.
        seconds: that it took.
        training: of ``card.facts_of``.
    """
    return {
        "format": _FORMAT,
        "horo": __version__,
        "command": list(job.command),
        "began": began_s,
        "seconds": seconds,
        "exit": {"code": code, "signal": signal_name(number) if number else None, "reasons": list(told)},
        "cause": None if cause is None else {word: cause.rank, "host": cause.host, "how": how_it_failed(cause)},
        "training": training,
        f"{word}s": [_process(each, word) for each in endings],
    }


def _process(ending: Ending, word: str) -> dict[str, Any]:
    has_code = not (ending.signal or ending.lost)
    return {
        word: ending.rank,
        "host": ending.host,
        "code": ending.code if has_code else None,
        "signal": signal_name(ending.signal) if ending.signal else None,
        "lost": ending.lost or None,
        "error": ending.note.error or None,
        "where": ending.note.where or None,
        "asked": ending.asked,
        "steps": None if ending.note.summary is None else ending.note.summary.steps,
        "within": None if ending.note.summary is None else ending.note.summary.within or None,
    }


def check_report(path: str) -> None:
    """Whether the report can be written, by the file that is written beside it: a later failure would lose it.

    Removes that of an earlier job, which would be taken for this one's if hororun ends before it has started any.

    Raises:
        JobError: it cannot, for the named reason.
    """
    check_file(_OPTION, path)
    draft = _draft(path)
    try:
        os.close(open_own_file(draft))
        draft.unlink()
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        raise JobError(f"{_OPTION} {path}: {error.strerror or error}") from None


def check_file(option: str, path: str) -> None:
    """Whether a result can be written to a file, without making it.

    Raises:
        JobError: it cannot, for the named reason.
    """
    file = Path(path)
    try:
        if file.is_dir() or path.endswith("/"):
            raise JobError(f"{option} {path}: is a folder; name a file for the result")
        if file.is_symlink() or (file.exists() and not file.is_file()):  # else the job would run for nothing
            kind = "a symbolic link" if file.is_symlink() else "no regular file"
            raise JobError(f"{option} {path}: is {kind}; name another file for the result")
        if is_script(file):
            why = "is a script, which the result would replace; name a file for the result before it"
            raise JobError(f"{option} {path}: {why}")
        if not file.parent.is_dir():
            raise JobError(f"{option} {path}: there is no folder {str(file.parent)!r}")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise JobError(f"{option} {path}: may not be written")
    except OSError as error:  # the name is too long, or a folder above may not be entered
        raise JobError(f"{option} {path}: {error.strerror or error}") from None


def write_report(path: str, values: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Writes a report beside its file, and renames it. A failure is a sentence: the exit code of the job stays."""
    draft = _draft(path)
    try:
        with os.fdopen(open_own_file(draft), "w", encoding="utf-8") as file:
            file.write(json.dumps(values, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        say(f"{_OPTION} {path}: {error.strerror or error}")


def _draft(path: str) -> Path:
    return Path(f"{path}.{os.getpid()}.new")
