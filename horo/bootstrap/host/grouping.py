"""Computes the hosts of the ranks and the links between ranks: pure arithmetic on rank numbers."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from horo.bootstrap.auth.handshake import Purpose
from horo.errors import UsageError

__all__ = ["Grouping", "Link", "control_peers", "data_peers", "group_ranks", "index_among"]


class Link(NamedTuple):
    """One stream between two hosts, from the view of one end."""

    purpose: Purpose
    host: int
    """Index of the other host."""
    peer: int
    """Rank at the other end."""
    number: int = 0
    """Number among the streams with this purpose between the two."""


@dataclass(frozen=True)
class Grouping:
    """The assignment of ranks to hosts. A host is a set of ranks that share one arena, numbered by its lowest rank."""

    host_of_rank: tuple[int, ...]

    @property
    def size(self) -> int:
        """Ranks in the job."""
        return len(self.host_of_rank)

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host in ascending order; the first is its leader."""
        members: list[list[int]] = [[] for _ in range(max(self.host_of_rank) + 1)]
        for rank, host in enumerate(self.host_of_rank):
            members[host].append(rank)
        return tuple(map(tuple, members))

    @cached_property
    def owner_count(self) -> int:
        """Local indices below this exist on every host; their ranks, the owners, share the traffic between hosts."""
        return min(map(len, self.hosts))

    def members(self, rank: int) -> tuple[int, ...]:
        """The ranks on the host of ``rank``."""
        return self.hosts[self.host_of_rank[rank]]

    def local_index(self, rank: int) -> int:
        """Position of ``rank`` among the ranks of its host."""
        return self.members(rank).index(rank)

    def links(self, rank: int, data_sockets: int = 1) -> list[Link]:
        """All streams that ``rank`` has to other hosts: control links of leaders, then data links of owners.

        ``data_sockets`` is the number of streams of a data link; 0: no links for data.
        """
        host, index, count = self.host_of_rank[rank], self.local_index(rank), len(self.hosts)
        found = []
        if index == 0:
            found += [Link(Purpose.CONTROL, other, self.hosts[other][0]) for other in control_peers(host, count)]
        if index < self.owner_count:
            found += [
                Link(Purpose.DATA, other, self.hosts[other][index], number)
                for other in data_peers(host, count)
                for number in range(data_sockets)
            ]
        return found


def group_ranks(key_of_rank: Sequence[Hashable]) -> Grouping:
    """Ranks with equal keys form a host."""
    host_of_key: dict[Hashable, int] = {}
    return Grouping(tuple(host_of_key.setdefault(key, len(host_of_key)) for key in key_of_rank))


def index_among(ranks: Sequence[Any], own: int, size: int) -> tuple[int, tuple[int, ...]]:
    """This rank's index in a list of ranks, and the list as integers.

    Raises:
        UsageError: ``ranks`` names no or unknown ranks, one twice, or not this one.
    """
    try:
        chosen = tuple(operator.index(rank) for rank in ranks)
    except TypeError:
        raise UsageError(f"init(comm={ranks!r}): a list of ranks holds integers only") from None
    shown = f"init(comm={list(chosen)})"
    if not chosen:
        raise UsageError(f"{shown}: the list names no rank; comm=None means all of them")
    for rank, times in Counter(chosen).items():
        if not 0 <= rank < size:
            raise UsageError(f"{shown}: {rank} is no rank of this job, which has ranks 0 to {size - 1}")
        if times > 1:
            raise UsageError(f"{shown}: rank {rank} is listed {times} times")
    if own not in chosen:
        raise UsageError(f"{shown}: this process is rank {own}, which is not in the list, so it must not call init()")
    return chosen.index(own), chosen


def control_peers(host: int, count: int) -> list[int]:
    """The hosts, of ``count``, to whose leaders the leader of ``host`` has a link: its parent and its children.

    They form the binomial tree rooted at host 0: the parent is the number with the lowest set bit cleared. Its depth is
    at most log2(count) + 1. ``native/src/node/team.h`` has the same rule for the core.
    """
    peers = [host & (host - 1)] if host else []
    bit = 1
    while host | bit < count and not host & bit:
        peers.append(host | bit)
        bit <<= 1
    return peers


def data_peers(host: int, count: int) -> list[int]:
    """The hosts, of ``count``, with which the owners on ``host`` exchange data, ascending.

    Their distance round the ring of hosts, in either direction, is a power of two: the algorithms between hosts use no
    other links, whatever the operation and its root. ``native/src/node/team.h`` has the same rule for the core, which
    refuses to start without these links.
    """
    distances = [1 << bit for bit in range((count - 1).bit_length())]
    return sorted({(host + sign * distance) % count for distance in distances for sign in (1, -1)})
