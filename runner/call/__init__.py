"""``horo.run``: calls a function in ranks that hororun starts, and returns its results."""

from __future__ import annotations

from horo.runner.call.parent import run

__all__ = ["run"]
