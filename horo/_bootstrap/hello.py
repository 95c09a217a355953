"""What every rank tells all others first, and what must be equal in it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from horo import __version__
from horo._bootstrap.grouping import Grouping, group_ranks
from horo._bootstrap.identity import Identity
from horo._bootstrap.launch import Launch, Place
from horo._config import Config, variables_of
from horo._errors import MismatchError

__all__ = ["Hello", "check_agreement", "core_count", "place_of", "places_alike"]

_SHARED_SETTINGS = (
    "segment_bytes",
    "fusion_threshold",
    "cache_capacity",
    "cpu_operations",
    "transport",
    "sockets_per_peer",
)


@dataclass(frozen=True)
class Hello:
    """One rank's introduction."""

    horo: str
    """Version of the package."""
    core: str
    """Version of the native core and its protocol."""
    host: str
    """Host name for messages."""
    size: int
    """Size of the job as this rank was told."""
    settings: dict[str, int | str | None]
    """Values that must be equal on all ranks, by variable; None: not set."""
    identity: Identity
    address: str | None
    """From where this rank reaches the store."""
    cpus: int
    """Bit mask of the cores this rank may run on."""
    local: tuple[int, int] | None
    node: int | None
    mpi_threads: bool
    """Whether it has an MPI that may be called from any thread."""

    @classmethod
    def of(cls, launch: Launch, config: Config, identity: Identity, address: str | None, core: str) -> Hello:
        """This rank's."""
        variables = variables_of(Config)
        return cls(
            horo=__version__,
            core=core,
            host=launch.host_name,
            size=launch.size,
            settings={
                **{variables[name].names[0]: getattr(config, name) for name in _SHARED_SETTINGS},
                "HORO_SECRET (1: set)": int(launch.secret is not None),
            },
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
    def decode(cls, data: bytes) -> Hello:
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


def check_agreement(messages: Sequence[bytes], name: Callable[[int, str], str]) -> list[Hello]:
    """Decodes the introductions of all ranks.

    Args:
        messages: by rank.
        name: gives a rank's name for messages from its number and host.

    Raises:
        MismatchError: two ranks differ in version, job size or a shared setting; names both, their hosts and values.
    """
    _check_versions(messages, name)
    hellos = [Hello.decode(message) for message in messages]
    first = hellos[0]
    for rank, hello in enumerate(hellos):
        for variable, value in {"the job's size": first.size, **first.settings}.items():
            other = hello.size if variable == "the job's size" else hello.settings[variable]
            if other != value:
                raise MismatchError(
                    f"{variable} is {value} on {name(0, first.host)} and {other} on {name(rank, hello.host)}; it must "
                    "be equal on all ranks"
                )
    return hellos


def _check_versions(messages: Sequence[bytes], name: Callable[[int, str], str]) -> None:
    # Only these three entries are relied on: another version may say everything else differently.
    told = [{key: str(json.loads(message).get(key)) for key in ("horo", "core", "host")} for message in messages]
    first = told[0]
    for rank, other in enumerate(told):
        if (other["horo"], other["core"]) != (first["horo"], first["core"]):
            raise MismatchError(
                f"{name(0, first['host'])} runs horo {first['horo']} (core {first['core']}), "
                f"{name(rank, other['host'])} runs horo {other['horo']} (core {other['core']}); install the same "
                "version on all hosts"
            )


def core_count(hellos: Sequence[Hello]) -> int:
    """Cores that these ranks may run on, together."""
    mask = 0
    for hello in hellos:
        mask |= hello.cpus
    return mask.bit_count()


def place_of(launch: Launch, hellos: Sequence[Hello], arenas: Grouping) -> Place:
    """Local and cross rank and size: the launcher's word where it gave it, else counted."""
    counted = _count(launch.rank, hellos, _nodes(hellos, arenas))
    return Place(*(launch.local or counted[:2]), *(launch.cross or counted[2:]))


def places_alike(hellos: Sequence[Hello], arenas: Grouping) -> bool:
    """Whether all hosts have equally many ranks."""
    nodes = _nodes(hellos, arenas)
    return len({hello.local[1] if hello.local else len(nodes.members(r)) for r, hello in enumerate(hellos)}) == 1


def _nodes(hellos: Sequence[Hello], arenas: Grouping) -> Grouping:
    """The launcher's hosts where it numbers them; two may share a machine, and one may have several arenas."""
    if any(hello.node is None for hello in hellos):
        return arenas
    return group_ranks([hello.node for hello in hellos])


def _count(rank: int, hellos: Sequence[Hello], nodes: Grouping) -> Place:
    """The place among ``nodes``; hosts are compared by the launcher's local ranks where it told all of them."""
    own = nodes.members(rank)
    told = [hello.local[0] for hello in hellos if hello.local is not None]
    numbers = told if len(told) == len(hellos) else [nodes.local_index(other) for other in range(len(hellos))]
    across = [members for members in nodes.hosts if any(numbers[other] == numbers[rank] for other in members)]
    return Place(nodes.local_index(rank), len(own), across.index(own), len(across))
