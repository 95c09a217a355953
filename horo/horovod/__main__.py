"""``python -m horo.horovod train.py``: Python with horo under Horovod's names.

The arguments are those of ``python``: a script or ``-m module``, and its own arguments.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from horo.config.table import environment
from horo.horovod.environment import with_horovod

__all__ = ["main"]

_USAGE = """usage: python -m horo.horovod train.py [arguments] | -m module [arguments] | -c code

Runs a script that was written for Horovod with horo, unchanged: 'import horovod.torch' gives horo.torch."""


def main() -> int:
    """Replaces this process by a Python that runs the script; returns only if it cannot."""
    words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        return 0
    if not words:
        sys.stderr.write(_USAGE + "\n")
        return 2
    if sys.flags.ignore_environment:
        sys.stderr.write("horo.horovod: this Python ignores PYTHONPATH (-I, -E): leave that out\n")
        return 2
    os.execve(sys.executable, [sys.executable, *_flags(sys.orig_argv, len(words)), *words], with_horovod(environment()))
    return 0


def _flags(command: Sequence[str], word_count: int) -> list[str]:
    """The options of Python before ``-m horo.horovod`` in a command line that ends in some words for the script."""
    own = list(command[1 : len(command) - word_count])
    if own and own[-1] == "horo.horovod":
        del own[-1]
    elif own:
        own[-1] = own[-1].removesuffix("horo.horovod")
    if not own or not own[-1].startswith("-") or not own[-1].endswith("m"):
        return list(subprocess._args_from_interpreter_flags())  # type: ignore[attr-defined]  # started in another way
    rest = own.pop()[:-1]  # -um is -u and -m
    return own if rest == "-" else [*own, rest]


if __name__ == "__main__":
    sys.exit(main())
