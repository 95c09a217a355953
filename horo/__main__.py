"""``python -m horo`` is ``hororun``."""

from __future__ import annotations

import sys

from horo.runner.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
