"""The command line of hororun: ``main`` runs it, ``parse`` only reads it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horo.runner.cli.entry import parse

__all__ = ["main", "main_for_horovod", "parse"]


def main(arguments: Sequence[str] | None = None, *, for_horovod: bool = False) -> int:
    """Runs hororun, or horovodrun, and returns its exit code."""
    try:
        from horo.runner.cli.entry import run  # noqa: PLC0415 - an interrupt meanwhile is taken here

        return run(arguments, for_horovod=for_horovod)
    except KeyboardInterrupt:  # while ranks run, the job takes the signal
        if sys.stderr is not None:
            sys.stderr.write("hororun: interrupted\n")
        return 128 + signal.SIGINT


def main_for_horovod() -> int:
    """Runs horovodrun, which is ``hororun --horovod``, and returns its exit code."""
    return main(for_horovod=True)


def __getattr__(name: str) -> Any:
    if name != "parse":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from horo.runner.cli.entry import parse  # noqa: PLC0415 - as in main

    return parse
