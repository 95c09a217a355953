"""A rank's knowledge of all ranks of its job: their hosts, their addresses, and the job's secret."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from horo._bootstrap.host.grouping import Grouping
from horo._bootstrap.rendezvous import list_ranks

__all__ = ["Directory", "PeerAddress"]


@dataclass(frozen=True)
class PeerAddress:
    """What decides how to reach a rank."""

    machine: tuple[str, int]
    """Equal where loopback leads from one to the other."""
    address: str | None
    """From where it reaches the store; None if unknown."""


@dataclass(frozen=True)
class Directory:
    """Enough to make authenticated links to any rank, at the start and later. Equal on all ranks but for ``rank``."""

    rank: int
    """Of this process."""
    grouping: Grouping
    peers: Sequence[PeerAddress] = field(repr=False)
    """By rank."""
    host_names: Sequence[str] = field(repr=False)
    """By rank, for messages."""
    secret: bytes = field(repr=False)
    """The job's; empty in a job of one rank, which has nobody to prove it to."""
    epoch: int
    """Number of this start; part of what is proven."""
    timeout_s: float
    """Longest wait for a connection without any progress (``HORO_START_TIMEOUT``)."""
    interfaces: str | None = None
    """The user's choice of interfaces here, see ``interfaces.select_addresses``."""
    sockets_per_peer: int = 1
    data_by_mpi: bool = False
    """Data needs no links."""

    @property
    def data_sockets(self) -> int:
        """Streams per link for data; 0: links for agreement only."""
        return 0 if self.data_by_mpi else self.sockets_per_peer

    def name(self, rank: int) -> str:
        """``rank 3 (h2)``."""
        return f"rank {rank} ({self.host_names[rank]})"

    def names(self, ranks: Sequence[int]) -> str:
        """A few ranks by name and the number of the rest."""
        return list_ranks([self.name(rank) for rank in ranks])
