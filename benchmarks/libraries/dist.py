"""torch.distributed over horo, in plain processes."""

from __future__ import annotations

import horo.torch.distributed  # noqa: F401  (registers the backend)
from horo import __version__
from libraries import gloo


class Opened(gloo.Opened):
    backend = "horo"

    def versions(self) -> dict[str, str]:
        return {**super().versions(), "horo": __version__}
