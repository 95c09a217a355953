"""Timelines of ranks, written by hand."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Clock", "write"]

Clock = Callable[[float], float]
"""What a clock shows, in microseconds, at a true time."""


def write(
    path: Path, rank: int, clock: str, shows: Clock, steps: Sequence[Sequence[float]], *, size: int = 2, name: str = "x"
) -> str:
    """A timeline of allreduces; of each: when this rank has submitted it, begun it and ended it, in true time."""
    zero = shows(0.0)
    head = {"name": f"rank {rank}", "start_time_since_epoch_in_micros": 10**15, "monotonic_ns": int(zero * 1000)}
    head |= {"rank": rank, "size": size, "host": f"h{clock}", "clock": clock}
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": head},
        {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": name}},
    ]

    def add(kind: str, true_us: float, name: str = "", **args: Any) -> None:
        event = {"ph": kind, "ts": round(shows(true_us) - zero, 3), "pid": 1, "tid": 0}
        events.append(event | ({"name": name} if name else {}) | ({"args": args} if args else {}))

    for number, (submitted, begun, ended) in enumerate(steps):
        add("B", submitted, "NEGOTIATE_ALLREDUCE")
        add("E", begun)
        add("B", begun, "ALLREDUCE")
        add("B", begun, "TCP_ALLREDUCE")
        add("E", ended)
        add("E", ended, team=0, record=100 * number + 40)
    lines = ",\n".join(json.dumps(event) for event in events)
    path.write_text(f"[\n{lines}\n]\n")
    return str(path)
