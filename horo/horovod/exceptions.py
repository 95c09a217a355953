"""The names that scripts import from ``horovod.common.exceptions``."""

from __future__ import annotations

from horo.errors import HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(Exception):
    """Horovod raises it in elastic jobs when hosts join or leave. This version of horo has none and never raises it."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Horovod raises it when it was compiled against another torch. horo is not linked with torch and never does."""
