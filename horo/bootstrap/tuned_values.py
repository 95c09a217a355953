"""The sizes that a job begins with, and the search for better ones while it runs (``HORO_AUTOTUNE``)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from horo.autotune import Search
from horo.config.table import Config
from horo.core.context import Context
from horo.core.setup import Setup
from horo.errors import UsageError
from horo.own_file import open_own_file

__all__ = [
    "check_log",
    "first_segment_bytes",
    "first_values",
    "overlap_pays",
    "search_of",
    "slot_bytes",
    "sockets_to_open",
    "tuned_overlap",
    "tuned_settings",
]

_ONE_HOST_SEGMENT_BYTES = 1 << 18
_SEVERAL_HOSTS_SEGMENT_BYTES = 1 << 20
_LARGEST_SEGMENT_BYTES = 1 << 22
"""The limit of a search, unless the job begins with a larger one. Pages of slots that are not used take no memory."""
_MOST_SOCKETS = 4
"""The limit of a search, per peer; each socket that is not used takes a connection."""
_OVERLAPS = {1: "never", 2: "always"}
_SETTINGS = {
    "segment": "segment_bytes",
    "sockets": "sockets_per_peer",
    "fusion": "fusion_threshold",
    "cycle": "cycle_time_ms",
    "overlap": "overlap",
}
"""The settings of the user by the names in ``KNOBS``; the other knobs have none."""


def first_segment_bytes(config: Config, machines: int) -> int:
    """Within a host, segments are small, to stay in the cache; between hosts, they are large, to keep the link busy."""
    if config.segment_bytes is not None:
        return config.segment_bytes
    return _SEVERAL_HOSTS_SEGMENT_BYTES if machines > 1 else _ONE_HOST_SEGMENT_BYTES


def slot_bytes(config: Config, machines: int) -> int:
    """The room for a segment."""
    first = first_segment_bytes(config, machines)
    return max(first, _LARGEST_SEGMENT_BYTES) if config.autotune else first


def sockets_to_open(config: Config) -> int:
    """The connections for data between two ranks of different hosts."""
    return max(config.sockets_per_peer, _MOST_SOCKETS) if config.autotune else config.sockets_per_peer


def check_log(config: Config, rank: int) -> None:
    """Raises UsageError where rank 0 could not write ``HORO_AUTOTUNE_LOG``; before the ranks connect.

    An earlier file is empty then.
    """
    if config.autotune and rank == 0 and config.autotune_log is not None:
        try:
            os.close(open_own_file(config.autotune_log))
        except OSError as error:
            raise UsageError(f"{config.told('autotune_log')} cannot be written on rank 0: {error.strerror}") from None


def search_of(config: Config, setup: Setup, machines: int) -> Search | None:
    """The search of a job, for rank 0; None: there is none, or this is another rank."""
    if not config.autotune or setup.rank != 0:
        return None
    default = replace(config, segment_bytes=None, sockets_per_peer=1, fusion_threshold=128 << 20, cycle_time_ms=0.0)
    first = first_values(config, machines)
    ranges = {"segment": (4096, setup.segment_bytes), "fusion": (1 << 18, 1 << 30)}
    if max(setup.host_of_rank) > 0:
        ranges |= {"piece": (4096, 1 << 22), "doubling": (1 << 10, 1 << 20), "carried": (1 << 9, 1 << 14)}
        if setup.mpi is None:
            ranges["sockets"] = (1, setup.sockets_per_peer)
    if first["cycle"] > 0:  # a user who has asked for no extra wait gets none
        ranges["cycle"] = (128, first["cycle"])
    if first["overlap"] > 0:
        ranges["overlap"] = (1, 2)
    return Search(
        first_values(default, machines),
        ranges,
        config.autotune_warmup_samples,
        config.autotune_steps_per_sample,
        config.autotune_max_samples,
        config.autotune_log,
    )


def first_values(config: Config, machines: int) -> dict[str, int]:
    """The values that a job begins with, by the names of ``KNOBS``.

    Gradients that travel at the end of backward never travel meanwhile by a search.
    """
    overlaps = config.overlap == "always" or (config.overlap == "auto" and machines > 1)
    return {
        "segment": first_segment_bytes(config, machines),
        "sockets": config.sockets_per_peer,
        "fusion": min(config.fusion_threshold, 1 << 30),
        "cycle": math.ceil(config.cycle_time_ms * 1000),
        "overlap": 2 if overlaps else 0,
    }


def overlap_pays(overlap: str, host_count: int, threads: int, cores: int) -> bool:
    """Whether gradients are best reduced while backward still runs.

    They are if a network carries them meanwhile, or if cores are idle, as while a GPU computes.

    Args:
        overlap: the value of ``HORO_OVERLAP``.
        host_count: hosts of the job.
        threads: those of all ranks that compute on this host's cores.
        cores: the cores of this host.
    """
    if overlap != "auto":
        return overlap == "always"
    return host_count > 1 or threads < cores


def tuned_overlap(context: Context, configured: str) -> tuple[str, bool]:
    """The value in force for ``HORO_OVERLAP``, and whether it may still change."""
    values, is_final = context.tuning()
    return _OVERLAPS.get(values["overlap"], configured), not is_final


def tuned_settings(context: Context, start: Mapping[str, int]) -> dict[str, Any]:
    """The settings whose values are others now than those in ``start``, with which the search began."""
    values, _ = context.tuning()
    changed = {knob: value for knob, value in values.items() if knob in start and value != start[knob]}
    return {_SETTINGS[knob]: _setting(knob, value) for knob, value in changed.items()}


def _setting(knob: str, value: int) -> Any:
    return value / 1000 if knob == "cycle" else _OVERLAPS[value] if knob == "overlap" else value
