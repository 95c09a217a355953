"""Whole groups of ranks in one process, connected without any bootstrap: for tests with ranks as threads."""

import os
import socket
from collections.abc import Sequence
from typing import Any

from slow_links import Relays

from horo.bootstrap.auth.handshake import Purpose
from horo.bootstrap.host.grouping import Grouping, control_peers, data_peers, group_ranks
from horo.core.memory import arena_bytes, create_memory, create_wake
from horo.core.setup import Setup, close_all
from horo.core.setup import close_setup as close_setup  # noqa: PLC0414 - for those who make setups


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
        wakes = [create_wake() for _ in members if host_count > 1]
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


def make_team_links(
    host_of_rank: Sequence[int], ranks: Sequence[int], *, tcp: bool = False, sockets: int = 1
) -> dict[int, dict[str, list[int]]]:
    """Links of a team with these members: by rank the descriptors for ``Context.add_team``, none on one host.

    Args:
        host_of_rank: of the job.
        ranks: the members, ascending.
        tcp: as for ``make_setups``.
        sockets: per peer, for data.
    """
    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(host_of_rank[rank], []).append(rank)
    places = list(members.values())
    count = len(places)
    if count == 1:
        return {rank: {} for rank in ranks}
    made = {rank: {"control_fds": [-1] * count, "data_fds": [-1] * count * sockets} for rank in ranks}
    for a in range(count):
        for b in range(a + 1, count):
            if b in control_peers(a, count):
                one, other = _pair(tcp)
                made[places[a][0]]["control_fds"][b], made[places[b][0]]["control_fds"][a] = one, other
            for i in range(min(map(len, places)) if b in data_peers(a, count) else 0):
                for n in range(sockets):
                    one, other = _pair(tcp)
                    made[places[a][i]]["data_fds"][b * sockets + n] = one
                    made[places[b][i]]["data_fds"][a * sockets + n] = other
    return made


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
