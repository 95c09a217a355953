"""Peer info: the data about a rank that it publishes first; parts must be equal on all ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from horo import __version__
from horo._bootstrap.host.grouping import Grouping, group_ranks
from horo._bootstrap.host.identity import Identity
from horo._bootstrap.launchers.launch import Launch, Place
from horo._config import Config, variables_of
from horo.errors import MismatchError

__all__ = ["PeerInfo", "check_agreement", "core_count", "place_of", "places_alike"]

_SHARED_SETTINGS = (
    "segment_bytes",
    "fusion_threshold",
    "cache_capacity",
    "cpu_operations",
    "transport",
    "sockets_per_peer",
)


@dataclass(frozen=True)
class PeerInfo:
    """Facts about one rank that its peers need before they connect."""

    horo: str
    """Version of the package."""
    core: str
    """Version of the native core and its protocol."""
    host: str
    """Host name for messages."""
    size: int
    """Size of the job, from this rank's environment."""
    settings: dict[str, int | str | None]
    """Values that must be equal on all ranks, by variable; None: not set."""
    identity: Identity
    address: str | None
    """Local address of this rank's connection to the store."""
    cpus: int
    """Bit mask of the cores this rank may run on."""
    local: tuple[int, int] | None
    """Local rank and size from the launcher."""
    node: int | None
    """Number of the host from the launcher."""
    mpi_threads: bool
    """Whether this rank has an MPI with ``MPI_THREAD_MULTIPLE``."""

    @classmethod
    def of(cls, launch: Launch, config: Config, identity: Identity, address: str | None, core: str) -> PeerInfo:
        """The peer info of this process."""
        variables = variables_of(Config)
        return cls(
            horo=__version__,
            core=core,
            host=launch.host_name,
            size=launch.size,
            settings={variables[name].names[0]: getattr(config, name) for name in _SHARED_SETTINGS},
            identity=identity,
            address=address,
            cpus=sum(1 << cpu for cpu in os.sched_getaffinity(0)),
            local=launch.local,
            node=launch.node,
            mpi_threads=launch.mpi is not None and launch.mpi.threads_multiple,
        )

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps({**asdict(self), "cpus": hex(self.cpus)}).encode()

    @classmethod
    def decode(cls, data: bytes) -> PeerInfo:
        """From JSON.

        Raises:
            ValueError, KeyError, TypeError: ``data`` is from another version of horo, or damaged.
        """
        values = json.loads(data)
        local = values.pop("local")
        return cls(
            **{
                **values,
                "identity": Identity(**values["identity"]),
                "cpus": int(values["cpus"], 16),
                "local": None if local is None else (int(local[0]), int(local[1])),
            }
        )


def check_agreement(messages: Sequence[bytes], name: Callable[[int, str], str]) -> list[PeerInfo]:
    """Decodes the peer info of all ranks and compares the shared settings.

    Args:
        messages: encoded peer info, by rank.
        name: makes a rank's name for messages from its number and host.

    Raises:
        MismatchError: two ranks differ in version, job size or a shared setting; names both, their hosts and values.
    """
    _check_versions(messages, name)
    peers = [PeerInfo.decode(message) for message in messages]
    first = peers[0]
    for rank, peer in enumerate(peers):
        for variable, value in {"the job's size": first.size, **first.settings}.items():
            other = peer.size if variable == "the job's size" else peer.settings[variable]
            if other != value:
                raise MismatchError(
                    f"{variable} is {value} on {name(0, first.host)} and {other} on {name(rank, peer.host)}; it must "
                    "be equal on all ranks"
                )
    return peers


def _check_versions(messages: Sequence[bytes], name: Callable[[int, str], str]) -> None:
    # Only these three entries are relied on: another version may encode the rest differently.
    said = [json.loads(message) for message in messages]
    versions = [{key: str(entry.get(key)) for key in ("horo", "core", "host")} for entry in said]
    first = versions[0]
    for rank, other in enumerate(versions):
        if (other["horo"], other["core"]) != (first["horo"], first["core"]):
            raise MismatchError(
                f"{name(0, first['host'])} runs horo {first['horo']} (core {first['core']}), "
                f"{name(rank, other['host'])} runs horo {other['horo']} (core {other['core']}); install the same "
                "version on all hosts"
            )


def core_count(peers: Sequence[PeerInfo]) -> int:
    """Cores that these ranks may run on, together."""
    mask = 0
    for peer in peers:
        mask |= peer.cpus
    return mask.bit_count()


def place_of(launch: Launch, peers: Sequence[PeerInfo], arenas: Grouping) -> Place:
    """Local and cross rank and size: the launcher's numbers if it set them, else counted."""
    counted = _count(launch.rank, peers, _nodes(peers, arenas))
    return Place(*(launch.local or counted[:2]), *(launch.cross or counted[2:]))


def places_alike(peers: Sequence[PeerInfo], arenas: Grouping) -> bool:
    """Whether all hosts have equally many ranks."""
    nodes = _nodes(peers, arenas)
    return len({peer.local[1] if peer.local else len(nodes.members(r)) for r, peer in enumerate(peers)}) == 1


def _nodes(peers: Sequence[PeerInfo], arenas: Grouping) -> Grouping:
    """The launcher's hosts if it numbers them; two may share a machine, and one may have several arenas."""
    if any(peer.node is None for peer in peers):
        return arenas
    return group_ranks([peer.node for peer in peers])


def _count(rank: int, peers: Sequence[PeerInfo], nodes: Grouping) -> Place:
    """The place among ``nodes``. Uses the launcher's local ranks if it set them for all ranks."""
    own = nodes.members(rank)
    launched = [peer.local[0] for peer in peers if peer.local is not None]
    numbers = launched if len(launched) == len(peers) else [nodes.local_index(other) for other in range(len(peers))]
    across = [members for members in nodes.hosts if any(numbers[other] == numbers[rank] for other in members)]
    return Place(nodes.local_index(rank), len(own), across.index(own), len(across))
