"""The commands ``python -m horo.timeline FILE ...`` and ``python -m horo.timeline merge OUT FILE ...``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from horo.runner.text import printable
from horo.timeline.merging import merge
from horo.timeline.reading import TimelineError
from horo.timeline.recording import finish, rows_of

__all__ = ["main"]

_MERGE = "merge"
_INTERRUPTED = 130
_MANY_BYTES = 1 << 24


def main(words: Sequence[str]) -> int:
    """Runs the command line; returns its exit code."""
    merges = words[:1] == [_MERGE]
    parser = argparse.ArgumentParser(
        prog=f"python -m horo.timeline{' merge' if merges else ''}",
        description="Puts the timelines of several ranks into one file, by one clock."
        if merges
        else "Makes timelines that their ranks have not ended, or shows what is in them so far.",
        epilog=None if merges else "'python -m horo.timeline merge --help' describes how ranks' timelines become one.",
    )
    if merges:
        parser.add_argument("out", metavar="OUT", help="the file to write")
    parser.add_argument("files", metavar="FILE", nargs="+", help="of a rank each: HORO_TIMELINE='t-{rank}.json'")
    given = parser.parse_args(words[1:] if merges else words)
    try:
        if not merges:
            return max([_make_or_tell(path) for path in given.files])
        for sentence in merge(given.out, given.files):
            print(printable(sentence))
    except TimelineError as error:
        return _tell(str(error))
    except KeyboardInterrupt:
        _tell(f"interrupted; later: python -m horo.timeline {' '.join(words)}")
        return _INTERRUPTED
    return 0


def _tell(sentence: str) -> int:
    print(printable(f"horo.timeline: {sentence}"), file=sys.stderr, flush=True)
    return 1


def _make_or_tell(path: str) -> int:
    try:
        print(printable(_make(path)))
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


if __name__ == "__main__":
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, _interrupt)
    sys.exit(main(sys.argv[1:]))
