"""The input of a rank's context, from its settings and its connections."""

from __future__ import annotations

import math
from collections.abc import Mapping

from horo.bootstrap.host.arena import Arena
from horo.bootstrap.host.grouping import Grouping
from horo.bootstrap.tuned_values import sockets_to_open
from horo.config.table import Config
from horo.core.setup import MpiUse, Setup

__all__ = ["setup_of"]


def setup_of(
    config: Config,
    *,
    rank: int,
    names: list[str],
    grouping: Grouping,
    arena: Arena,
    control: list[int],
    data: list[int],
    segment_bytes: int,
    mpi: MpiUse | None = None,
    tuned: Mapping[str, int] | None = None,
) -> Setup:
    """A setup; its descriptors are those of ``arena``, ``control`` and ``data``."""
    checked = not config.stall_check_disable  # times are rounded up: 0 means that there is no limit
    return Setup(
        rank=rank,
        size=grouping.size,
        host_of_rank=grouping.host_of_rank,
        host_name_of_rank=names,
        arena_fd=arena.memory,
        segment_bytes=segment_bytes,
        wake_fds=arena.wakes,
        life_fds=arena.lives,
        control_fds=control,
        data_fds=data,
        direct_bytes=Setup.direct_bytes if config.single_copy else 0,
        fusion_bytes=config.fusion_threshold,
        cache_capacity=config.cache_capacity,
        spin_us=config.spin_us,
        cycle_time_us=math.ceil(config.cycle_time_ms * 1000),
        stall_warning_ms=math.ceil(config.stall_check_time_s * 1000) if checked else 0,
        stall_shutdown_ms=math.ceil(config.stall_shutdown_time_s * 1000) if checked else 0,
        peer_timeout_ms=round(config.peer_timeout_s * 1000),
        log_level=config.log_level_number,
        sockets_per_peer=sockets_to_open(config),
        leaves_crowded_cores=config.leave_crowded_cores,
        mpi=mpi,
        tuned=tuned,
    )
