"""An entry of the flight recorder, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["Event", "event_of"]


class Event(NamedTuple):
    """One entry of the flight recorder; see ``horo_event`` in ``horo.h``."""

    time_ns: int
    """On the clock of ``time.monotonic_ns``."""
    event: str
    """One of ``horo.core.context.EVENTS``."""
    op: str
    """One of ``horo.core.context.OPS``; empty for the end of the group."""
    name: str
    """Name of the request, only its end if it is long; for a batch, the name of its first request."""
    bytes: int
    team: int
    number: int
    """For a batch: the count of its requests; for the end of the group: the rank at fault, or -1."""
    status: str
    """The status with which a request or the group failed, as ``"HORO_ERR_MISMATCH"``; else empty."""


def event_of(
    native: Any, name: str, kinds: Mapping[int, str], ops: Mapping[int, str], statuses: Mapping[int, str]
) -> Event:
    """A ``horo_event`` with its name and the names of its numbers."""
    op, status = ops.get(native.op, ""), statuses.get(native.status, "")
    return Event(native.time_ns, kinds[native.event], op, name, native.bytes, native.team, native.number, status)
