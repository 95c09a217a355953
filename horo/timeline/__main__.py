"""The commands ``python -m horo.timeline FILE ...``, ``... merge OUT FILE ...`` and ``... summary FILE ...``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from horo.runner.config import JobError
from horo.runner.stdout import show
from horo.runner.text import printable
from horo.timeline.merging import merge, together
from horo.timeline.reading import TimelineError
from horo.timeline.recording import finish, rows_of

__all__ = ["main", "run"]

_MERGE, _SUMMARY = "merge", "summary"
_DESCRIPTIONS = {
    "": "Makes timelines that their ranks have not ended, or shows what is in them so far.",
    _MERGE: "Puts the timelines of several ranks into one file, by one clock.",
    _SUMMARY: "Shows where the time of a step went and which rank was slow, as the card at the end of a job.",
}
_EPILOGS = {
    "": "'python -m horo.timeline merge --help' describes how ranks' timelines become one; "
    "'python -m horo.timeline summary FILE' shows where the time of a step went.",
    _MERGE: None,
    _SUMMARY: "It takes a rank as blocked from its last submission to its last result.",
}
_FILES = {
    "": "of a rank each: HORO_TIMELINE='t-{rank}.json'",
    _MERGE: "of a rank each: HORO_TIMELINE='t-{rank}.json'",
    _SUMMARY: "the result of merge, or files of a rank each",
}
_INTERRUPTED = 130
_MANY_BYTES = 1 << 24


def main(words: Sequence[str]) -> int:
    """Runs the command line; returns its exit code."""
    command = words[0] if words[:1] in ([_MERGE], [_SUMMARY]) else ""
    parser = argparse.ArgumentParser(
        prog=f"python -m horo.timeline {command}".rstrip(), description=_DESCRIPTIONS[command], epilog=_EPILOGS[command]
    )
    if command == _MERGE:
        parser.add_argument("out", metavar="OUT", help="the file to write")
    parser.add_argument("files", metavar="FILE", nargs="+", help=_FILES[command])
    given = parser.parse_args(words[1:] if command else words)
    try:
        if not command:
            return max([_make_or_tell(path) for path in given.files])
        for sentence in merge(given.out, given.files) if command == _MERGE else _summary(given.files):
            show(printable(sentence))
    except TimelineError as error:
        return _tell(str(error))
    except JobError as error:  # of stdout; its reader may have seen enough, as ``| head`` has
        return error.code if error.code == 128 + signal.SIGPIPE else _tell(str(error))
    except KeyboardInterrupt:
        _tell(f"interrupted; later: python -m horo.timeline {' '.join(words)}")
        return _INTERRUPTED
    return 0


def _summary(paths: Sequence[str]) -> list[str]:
    """The card of a job, from its timelines."""
    from horo.runner.job.card import details, pace  # noqa: PLC0415 - the other commands do without
    from horo.timeline.steps import steps_of  # noqa: PLC0415

    timelines, remarks = together(paths)
    facts = steps_of(timelines).facts
    return [f"{paths[0] if len(paths) == 1 else 'timelines'}: {pace(facts)}", *details(facts), *remarks]


def _tell(sentence: str) -> int:
    print(printable(f"horo.timeline: {sentence}"), file=sys.stderr, flush=True)
    return 1


def _make_or_tell(path: str) -> int:
    try:
        show(printable(_make(path)))
    except TimelineError as error:
        return _tell(str(error))
    return 0


def _make(path: str) -> str:
    rows = Path(rows_of(path))
    if rows.is_file() and rows.stat().st_size >= _MANY_BYTES:
        _tell(f"makes {path} of {rows.stat().st_size >> 20} MiB of rows, which takes a while")
    if finish(path, shows_now=True):
        more = " as of now: its rank goes on" if Path(rows_of(path)).exists() else ""
        return f"{path}: made of {rows_of(path)}{more}"
    if not Path(path).exists():
        raise TimelineError(f"{path}: there is neither this file nor {rows_of(path)}")
    return f"{path}: is whole; there is no {rows_of(path)}"


def _interrupt(_number: int, _frame: object) -> NoReturn:
    """Also of SIGTERM, by which hororun ends this after Ctrl-C; that may come twice."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def run(words: Sequence[str]) -> int:
    """The same as the command of a process of its own, which a signal interrupts."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    return main(words)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
