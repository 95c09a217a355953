"""``python -m horo`` is ``hororun``."""

from __future__ import annotations

import sys

from horo.runner.own_modules import leave_out_current_directory

__all__: list[str] = []

if __name__ == "__main__":
    leave_out_current_directory()
    from horo.runner.cli import main

    sys.exit(main())
