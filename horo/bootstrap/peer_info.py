"""Peer info: the data about a rank that it publishes first; parts must be equal on all ranks.

Rank 0 compares them and sends all ranks one table, in which each value stands once: what a job of n ranks reads in all
grows with n, times the few kilobytes of the table.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from horo.bootstrap.host.grouping import Grouping, group_ranks
from horo.bootstrap.host.identity import Identity
from horo.bootstrap.launchers.variables import Launch, Place
from horo.bootstrap.packed import pack, unpack
from horo.bootstrap.rendezvous import Rendezvous
from horo.config.table import Config
from horo.errors import MismatchError
from horo.version import __version__

__all__ = [
    "SHARED_SETTINGS",
    "PeerInfo",
    "check_agreement",
    "core_count",
    "exchange_peer_info",
    "machine_count",
    "place_of",
    "places_alike",
]

_TOPIC = "peer info"

SHARED_SETTINGS = (
    "segment_bytes",
    "fusion_threshold",
    "cache_capacity",
    "gpu_operations",
    "transport",
    "sockets_per_peer",
    "single_copy",
    "autotune",
    "gradients_ready",
    "first_checks",
    "check_nan",
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
    """Values that must be equal on all ranks, by the setting's name; None: not set."""
    sources: dict[str, str]
    """The source of each of these values: an argument, a variable, an option."""
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
        sources = {name: config.source(name) for name in SHARED_SETTINGS}
        if config.gradients_ready is None and config.horovod:
            sources["gradients_ready"] = config.source("horovod")
        settings = {name: getattr(config, name) for name in SHARED_SETTINGS}
        return cls(
            horo=__version__,
            core=core,
            host=launch.host_name,
            size=launch.size,
            settings={**settings, "gradients_ready": config.gradients_ready_default},
            sources=sources,
            identity=identity,
            address=address,
            cpus=sum(1 << cpu for cpu in os.sched_getaffinity(0)),
            local=launch.local,
            node=launch.node,
            mpi_threads=launch.mpi is not None and launch.mpi.threads_multiple,
        )

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(self._as_json()).encode()

    @classmethod
    def decode(cls, data: bytes) -> PeerInfo:
        """From JSON.

        Raises:
            ValueError, KeyError, TypeError: ``data`` is from another version of horo, or damaged.
        """
        return cls(**{name: _READERS.get(name, _as_it_is)(value) for name, value in json.loads(data).items()})

    def _as_json(self) -> dict[str, Any]:
        return {**vars(self), "identity": vars(self.identity), "cpus": hex(self.cpus)}


def _as_it_is(value: Any) -> Any:
    return value


_READERS: dict[str, Callable[[Any], Any]] = {
    "identity": lambda parts: Identity(**parts),
    "cpus": lambda mask: int(mask, 16),
    "local": lambda pair: None if pair is None else (int(pair[0]), int(pair[1])),
}
"""Make the values of fields from those of JSON."""


def exchange_peer_info(rendezvous: Rendezvous, own: PeerInfo) -> list[PeerInfo]:
    """Sends this rank's peer info and returns that of all ranks; host names are known to ``rendezvous`` from then on.

    Raises:
        MismatchError: as ``check_agreement``, on all ranks alike. Others: as ``Rendezvous.gather``.
    """

    def check(first: bytes) -> None:  # at once: rank 0 may wait for ranks that only its own size has
        check_agreement([first, own.encode()], lambda index, host: f"rank {index and rendezvous.rank} ({host})")

    peers = _read_table(rendezvous.share(_TOPIC, own.encode(), _make_table, check))
    rendezvous.host_names.update({rank: peer.host for rank, peer in enumerate(peers)})
    return peers


def _make_table(messages: Sequence[bytes]) -> bytes:
    """The peer info of all ranks by field: its different values, and for each rank the number of its own."""
    try:
        peers = check_agreement(messages, lambda rank, host: f"rank {rank} ({host})")
    except MismatchError as error:
        return pack({"mismatch": str(error)})
    boots: dict[str, int] = {}  # only whether two are equal counts, and a number is shorter
    rows = [
        replace(
            peer,
            identity=replace(peer.identity, boot_id=str(boots.setdefault(peer.identity.boot_id, len(boots)))),
            sources={},
        )._as_json()
        for peer in peers
    ]
    columns = {}
    for name in rows[0]:
        texts = [json.dumps(row[name]) for row in rows]
        number_of = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        columns[name] = [list(map(json.loads, number_of)), [number_of[text] for text in texts]]
    return pack({"columns": columns})


def _read_table(table: bytes) -> list[PeerInfo]:
    said = unpack(table)
    if "mismatch" in said:
        raise MismatchError(said["mismatch"])
    columns = {}
    for name, (values, numbers) in said["columns"].items():
        read = [_READERS.get(name, _as_it_is)(value) for value in values]
        columns[name] = [read[number] for number in numbers]
    return [PeerInfo(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


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
        ranks = name(0, first.host), name(rank, peer.host)
        if peer.size != first.size:
            raise _mismatch("the job's size", ranks, (first.size, peer.size))
        for setting, value in first.settings.items():
            if peer.settings[setting] != value:
                values = [f"{each.settings[setting]} ({each.sources[setting]})" for each in (first, peer)]
                raise _mismatch(f"the setting {setting}", ranks, values)
    return peers


def _mismatch(what: str, ranks: Sequence[str], values: Sequence[object]) -> MismatchError:
    return MismatchError(
        f"{what} is {values[0]} on {ranks[0]} and {values[1]} on {ranks[1]}; it must be equal on all ranks"
    )


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


def machine_count(infos: Sequence[PeerInfo]) -> int:
    """The machines that the ranks are on, whether or not those of one can share memory."""
    return len({info.identity for info in infos})


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
