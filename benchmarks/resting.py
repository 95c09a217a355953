"""What processes do while nothing is asked of them, as the kernel counts it; nothing here needs privileges."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Activity", "activity_of", "own_packets"]

# tcpi_segs_out and tcpi_segs_in in struct tcp_info of linux/tcp.h, which only ever grows at its end.
SEGMENTS = struct.Struct("136xII")


@dataclass(frozen=True)
class Activity:
    """Of some processes, all their threads together, since they started.

    Attributes:
        wake_ups: how often a thread that had gone to sleep by itself was woken: every voluntary switch is one.
        forced: how often a thread had to make way for another.
        cpu_ns: time on a core.
    """

    wake_ups: int
    forced: int
    cpu_ns: int

    def since(self, before: Activity) -> Activity:
        return Activity(self.wake_ups - before.wake_ups, self.forced - before.forced, self.cpu_ns - before.cpu_ns)


def activity_of(processes: Iterable[int], threads: Container[int] | None = None) -> Activity:
    """Now; a thread that ends meanwhile is left out.

    Args:
        processes: their numbers.
        threads: the numbers of the threads that count; None: all.
    """
    wake_ups = forced = cpu_ns = 0
    for process in processes:
        for thread in Path(f"/proc/{process}/task").iterdir():
            if threads is not None and int(thread.name) not in threads:
                continue
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                status = (thread / "status").read_text()
                wake_ups += int(status.partition("\nvoluntary_ctxt_switches:")[2].split(maxsplit=1)[0])
                forced += int(status.partition("\nnonvoluntary_ctxt_switches:")[2].split(maxsplit=1)[0])
                cpu_ns += int((thread / "schedstat").read_text().split(maxsplit=1)[0])
    return Activity(wake_ups, forced, cpu_ns)


def own_packets() -> tuple[int, int]:
    """TCP segments that this process's connections have sent and received, keep-alives included; and their number."""
    counts = [sum(SEGMENTS.unpack(_tcp_info(connection))) for connection in _connections()]
    return sum(counts), len(counts)


def _tcp_info(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SEGMENTS.size)


def _connections() -> Iterator[socket.socket]:
    """Duplicates of this process's TCP sockets, each open while it is looked at."""
    for entry in Path("/proc/self/fd").iterdir():
        if not entry.is_socket():
            continue
        with socket.socket(fileno=os.dup(int(entry.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                yield connection
