"""The command ``horo``: what belongs to horo beside a job, each as a word of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

_USAGE = """usage: horo COMMAND ...

  run ...                  hororun: runs a command as N ranks
  bench -np N ...          measures what this machine, or these hosts, can exchange
  trace merge OUT FILE ... puts the timelines of ranks into one file, with arrows from the rank that others waited for
  trace summary FILE ...   shows where the time of a step went, and who was slow
  trace FILE ...           makes a timeline that its rank has not ended

'horo COMMAND --help' describes each."""
_WRONG = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    command, *words = [*(sys.argv[1:] if arguments is None else arguments), ""]
    words = words[:-1]
    if command == "run":
        from horo.runner.cli import main as run  # noqa: PLC0415 - each command imports its own

        return run(words)
    if command == "bench":
        return _bench(words)
    if command == "trace":
        from horo.timeline.__main__ import run as trace  # noqa: PLC0415

        return trace(words)
    if command in ("-h", "--help"):
        print(_USAGE)
        return 0
    said = f"horo: {command!r} is no command\n" if command else ""
    print(said + _USAGE, file=sys.stderr)
    return _WRONG


def _bench(words: Sequence[str]) -> int:
    from horo.bench.options import BenchOptionError, split_words  # noqa: PLC0415
    from horo.runner.cli import main as run  # noqa: PLC0415

    try:
        others, own = split_words(words)
    except BenchOptionError as error:
        print(f"horo {error}", file=sys.stderr)
        return _WRONG
    return run(["--bench", *others, "--", *own])


if __name__ == "__main__":
    sys.exit(main())
