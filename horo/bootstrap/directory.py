"""The hosts and addresses of all ranks of a job, and the job's secret."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from horo.bootstrap.host.grouping import Grouping
from horo.bootstrap.rendezvous import list_ranks

__all__ = ["Directory", "PeerAddress"]


@dataclass(frozen=True)
class PeerAddress:
    """The machine and the address of a rank, for connections to it."""

    machine: tuple[str, int]
    """Equal for two ranks that can connect over loopback."""
    address: str | None
    """Local address of the rank's connection to the store; None if unknown."""


@dataclass(frozen=True)
class Directory:
    """The data that a rank needs to make authenticated links to any other rank, at the start and later.

    Equal on all ranks, except for ``rank`` and the settings of this rank.
    """

    rank: int
    """Rank of this process."""
    grouping: Grouping
    peers: Sequence[PeerAddress] = field(repr=False)
    """By rank."""
    host_names: Sequence[str] = field(repr=False)
    """By rank, for messages."""
    secret: bytes = field(repr=False)
    """The job's secret; empty in a job of one rank, which makes no connections."""
    epoch: int
    """Number of this start; the handshake covers it."""
    timeout_s: float
    """Longest wait for a connection without any progress (``HORO_START_TIMEOUT``)."""
    interfaces: str | None = None
    """The user's choice of interfaces on this host, see ``interfaces.select_addresses``."""
    ports: range | None = None
    """The ports on which this rank may listen; None: any."""
    sockets_per_peer: int = 1
    data_by_mpi: bool = False
    """Whether MPI carries the data, so that data needs no links."""

    @property
    def data_sockets(self) -> int:
        """Streams per link for data; 0: links for agreement only."""
        return 0 if self.data_by_mpi else self.sockets_per_peer

    def name(self, rank: int) -> str:
        """The rank with its host name: ``rank 3 (h2)``."""
        return f"rank {rank} ({self.host_names[rank]})"

    def names(self, ranks: Sequence[int]) -> str:
        """A few ranks by name and the number of the rest."""
        return list_ranks([self.name(rank) for rank in ranks])
