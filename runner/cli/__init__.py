"""The command line of hororun: ``main`` runs it, ``parse`` only reads it."""

from __future__ import annotations

from horo.runner.cli.entry import main, main_for_horovod, parse

__all__ = ["main", "main_for_horovod", "parse"]
