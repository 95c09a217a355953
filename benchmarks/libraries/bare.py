"""No library and no torch: the probe of the cores."""

from __future__ import annotations

import platform

from libraries import Exchange


class Opened:
    kind = "bare"
    module = None

    def __init__(self, rank: int, size: int, exchange: Exchange) -> None:
        del exchange
        self.rank, self.size = rank, size

    def barrier(self) -> None:
        """The probe's processes meet in their shared memory."""

    def versions(self) -> dict[str, str]:
        return {"python": platform.python_version()}

    def close(self) -> None:
        """Nothing was opened."""
