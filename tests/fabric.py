"""Whole groups of ranks in one process, connected without any bootstrap: for tests with ranks as threads."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from slow_links import Relays

from horo._bootstrap.descriptors import close_all, close_setup, create_memory, create_wake
from horo._bootstrap.grouping import Grouping, group_ranks
from horo._bootstrap.handshake import Purpose
from horo._core import arena_bytes
from horo._setup import Setup

__all__ = ["close_setup", "make_setups"]


def make_setups(
    hosts: Sequence[int] = (2,),
    *,
    host_of_rank: Sequence[int] | None = None,
    tcp: bool = False,
    segment_bytes: int = 1 << 16,
    data_links: bool = True,
    sockets_per_peer: int = 1,
    relays: Relays | None = None,
    **options: Any,
) -> list[Setup]:
    """One setup per rank, with real memfds, eventfds and connected stream sockets.

    Every setup has descriptors of its own (duplicates), so each may be given to a context, which then owns
    them, or to ``close_setup``.

    Args:
        hosts: ranks per host, filled in order: ``[2, 2]`` puts ranks 0, 1 on the first and 2, 3 on the second.
        host_of_rank: the host of each rank instead, for ranks that are placed in turn: ``[0, 1, 0, 1]``.
        tcp: connect hosts by TCP over loopback instead of socket pairs.
        segment_bytes: size of one arena slot; small, so that tests reach several segments quickly.
        data_links: connect hosts for data too; without it only what moves none (agreement, barriers) works, with fewer
            descriptors.
        sockets_per_peer: streams per link for data.
        relays: pass on what travels between hosts; not started yet, and the caller's to end.
        options: any other field of ``Setup`` (``fusion_bytes``, ``spin_us``, ``stall_warning_ms``, ...).
    """
    if host_of_rank is None:
        host_of_rank = [host for host, count in enumerate(hosts) for _ in range(count)]
    grouping = group_ranks(host_of_rank)
    host_count = len(grouping.hosts)
    arenas: dict[int, tuple[int, list[int], list[list[int]]]] = {}
    links = _connect_hosts(grouping, tcp, sockets_per_peer if data_links else 0, relays)
    for host, members in enumerate(grouping.hosts):
        life = [[-1] * len(members) for _ in members]
        for index in range(1, len(members)):
            life[0][index], life[index][0] = _pair(tcp=False)
        wakes = [create_wake() for _ in members]
        arenas[host] = (create_memory(arena_bytes(len(members), segment_bytes)), wakes, life)
    setups = []
    for rank in range(grouping.size):
        memory, wakes, life = arenas[grouping.host_of_rank[rank]]
        setups.append(
            Setup(
                rank=rank,
                size=grouping.size,
                host_of_rank=list(grouping.host_of_rank),
                host_name_of_rank=[f"host{host}" for host in grouping.host_of_rank],
                arena_fd=os.dup(memory),
                segment_bytes=segment_bytes,
                wake_fds=[os.dup(wake) for wake in wakes],
                life_fds=life[grouping.local_index(rank)],
                control_fds=[links.get((Purpose.CONTROL, rank, host, 0), -1) for host in range(host_count)],
                data_fds=[
                    links.get((Purpose.DATA, rank, host, number), -1)
                    for host in range(host_count if data_links else 0)
                    for number in range(sockets_per_peer)
                ],
                sockets_per_peer=sockets_per_peer,
                **options,
            )
        )
    for memory, wakes, _ in arenas.values():
        close_all([memory, *wakes])
    return setups


def _connect_hosts(
    grouping: Grouping, tcp: bool, data_sockets: int, relays: Relays | None
) -> dict[tuple[Purpose, int, int, int], int]:
    """Descriptor of (purpose, rank, other host, number) for every stream between hosts."""

    def pair() -> tuple[int, int]:
        return _pair(tcp)

    connected: dict[tuple[Purpose, int, int, int], int] = {}
    for rank in range(grouping.size):
        own_host = grouping.host_of_rank[rank]
        for link in grouping.links(rank, data_sockets):
            if link.host < own_host:
                here, there = pair() if relays is None else relays.connect(link.purpose, pair)
                connected[link.purpose, rank, link.host, link.number] = here
                connected[link.purpose, link.peer, own_host, link.number] = there
    return connected


def _pair(tcp: bool) -> tuple[int, int]:
    if not tcp:
        one, other = socket.socketpair()
        return one.detach(), other.detach()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialed = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    for end in (dialed, accepted):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return dialed.detach(), accepted.detach()
