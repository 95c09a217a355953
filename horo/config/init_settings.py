"""The settings that ``init()`` takes, for type checkers and editors; the table is that of ``horo/config/table.py``."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["InitSettings"]


class InitSettings(TypedDict, total=False):
    """By name; None: as if it were not given."""

    fusion_threshold: int | None
    cycle_time_ms: float | None
    cache_capacity: int | None
    stall_check_disable: bool | None
    stall_check_time_s: float | None
    stall_shutdown_time_s: float | None
    deadlock_time_s: float | None
    log_level: str | None
    timeline: str | None
    timeline_mark_cycles: bool | None
    start_timeout_s: float | None
    peer_timeout_s: float | None
    segment_bytes: int | None
    spin_us: int | None
    leave_crowded_cores: bool | None
    single_copy: bool | None
    overlap: str | None
    gradients_ready: str | None
    gpu_operations: str | None
    transport: str | None
    sockets_per_peer: int | None
    autotune: bool | None
    autotune_log: str | None
    autotune_warmup_samples: int | None
    autotune_steps_per_sample: int | None
    autotune_max_samples: int | None
    controller: str | None
    network_interfaces: str | None
    host_id: str | None
    port_range: str | None
    first_checks: bool | None
    check_nan: bool | None
