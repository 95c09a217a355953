"""The names that scripts import from ``horovod.common.exceptions``."""

from __future__ import annotations

from horo.elastic.state import HostsUpdatedInterrupt
from horo.errors import HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodVersionMismatchError(ImportError):
    """Horovod raises it when it was compiled against another torch. horo is not linked with torch and never does."""
