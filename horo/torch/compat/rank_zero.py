"""``rank_zero_only`` of Lightning and its kin, which decides by an attribute whether a process logs."""

from __future__ import annotations

import sys

__all__ = ["tell_rank"]

_HAVE_IT = ("lightning_utilities.core.rank_zero", "torchmetrics.utilities.prints")
"""The first is that of ``lightning``, ``pytorch_lightning`` and their Fabrics."""


def tell_rank(rank: int) -> None:
    """Sets the rank where these modules are loaded. Lightning reads variables that not every launcher sets."""
    for name in _HAVE_IT:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "rank_zero_only"):
            module.rank_zero_only.rank = rank
