"""``python -m`` puts the current directory before all modules; hororun wants none from there, ``json.py`` say."""

from __future__ import annotations

import os
import sys

__all__ = ["leave_out_current_directory"]


def leave_out_current_directory() -> None:
    """Removes the entry that ``python -m`` has put before ``sys.path``. The ranks' own Python keeps it."""
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return  # then it has put nothing there
    try:
        directory = os.getcwd()  # noqa: PTH109 - pathlib would be one more module from there
    except FileNotFoundError:
        return  # it is gone
    if sys.path[:1] in ([""], [directory]):
        del sys.path[0]
