"""The command ``python -m horo.timeline merge OUT FILE ...``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from horo.runner.printable import printable
from horo.timeline.merging import merge
from horo.timeline.reading import TimelineError

__all__ = ["main"]


def main(words: Sequence[str]) -> int:
    """Runs the command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m horo.timeline", description="Works on timelines of horo.")
    commands = parser.add_subparsers(dest="command", required=True)
    merging = commands.add_parser("merge", help="put the timelines of several ranks into one file, by one clock")
    merging.add_argument("out", metavar="OUT", help="the file to write")
    merging.add_argument("files", metavar="FILE", nargs="+", help="of a rank each: HORO_TIMELINE='t-{rank}.json'")
    given = parser.parse_args(words)
    try:
        for sentence in merge(given.out, given.files):
            print(printable(sentence))
    except TimelineError as error:
        print(printable(f"horo.timeline: {error}"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
