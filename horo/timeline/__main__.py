"""The commands ``python -m horo.timeline FILE ...`` and ``python -m horo.timeline merge OUT FILE ...``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from horo.runner.printable import printable
from horo.timeline.merging import merge
from horo.timeline.reading import TimelineError
from horo.timeline.recording import finish, rows_of

__all__ = ["main"]

_MERGE = "merge"


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
        for sentence in merge(given.out, given.files) if merges else map(_make, given.files):
            print(printable(sentence))
    except TimelineError as error:
        print(printable(f"horo.timeline: {error}"), file=sys.stderr)
        return 1
    return 0


def _make(path: str) -> str:
    if finish(path, shows_now=True):
        more = " as of now: its rank goes on" if Path(rows_of(path)).exists() else ""
        return f"{path}: made of {rows_of(path)}{more}"
    if not Path(path).exists():
        raise TimelineError(f"{path}: there is neither this file nor {rows_of(path)}")
    return f"{path}: is whole; there is no {rows_of(path)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
