"""``python -m`` puts the current directory before all modules; the commands of horo take none from there.

Nothing is imported here but what Python has loaded before: ``typing.py`` or ``__future__.py`` may lie there, too.
"""

import os
import sys

__all__ = ["leave_out_current_directory"]

_COMMANDS = ("horo", "horo.runner", "horo.timeline", "horo.horovod")
"""Not the ranks of ``horo.run``: functions of the program may need what lies beside it."""


def leave_out_current_directory() -> None:
    """Removes the entry that ``python -m horo...`` has put before ``sys.path``. The ranks' own Python keeps it.

    To be called while Python still looks for that module. Does nothing in any other program.
    """
    if not _is_command_of_horo() or sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return
    try:
        directory = os.getcwd()  # noqa: PTH109 - pathlib would be one more module from there
    except FileNotFoundError:
        return  # it is gone
    if sys.path[:1] in ([""], [directory]):
        del sys.path[0]


def _is_command_of_horo() -> bool:
    """Whether Python searches for one that is to be run. Until that is found, ``sys.argv`` begins with ``-m``."""
    argv = getattr(sys, "argv", [])  # an interpreter in another program may have none
    if argv[:1] != ["-m"] or len(sys.orig_argv) < len(argv):
        return False
    word = sys.orig_argv[-len(argv)]  # "horo.timeline", or with what stands before it, "-umhoro.timeline"
    module = word.partition("m")[2] if word.startswith("-") else word
    return module in _COMMANDS
