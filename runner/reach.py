"""At which addresses the hosts of a job meet: the key-value server and rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horo.runner.config import EXIT_SETUP, JobError
from horo.runner.network import (
    NetworkError,
    address_toward,
    interface_addresses,
    network_identity,
    own_address,
    resolve,
)

__all__ = ["LOOPBACK", "Reach", "meeting_addresses", "reach"]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Reach:
    """How a remote host and this one see each other.

    Attributes:
        launcher: addresses of this host for that one.
        host: address of that host for the others.
    """

    launcher: tuple[str, ...]
    host: str


def reach(name: str, hello: Mapping[str, Any], interfaces: Sequence[str]) -> Reach:
    """Works out the addresses from what the agent said; asks no name server unless ssh or srun left no trace.

    Args:
        name: of the host, as given to ``-H``.
        hello: what the agent said about its host.
        interfaces: of this host, to be used instead of the one that routes to the peer.

    Raises:
        JobError: there is no such address.
    """
    if hello["network"] == network_identity():
        return Reach((LOOPBACK,), LOOPBACK)
    words = str(hello["connection"]).split()
    here, there = (words[0], words[2]) if len(words) == 4 else ("", next(iter(resolve(name)), ""))
    if not there:
        raise JobError(
            f"host {name} has no address: its name is unknown here, and how it was reached is unknown there",
            EXIT_SETUP,
        )
    try:
        if interfaces:
            return Reach(tuple(interface_addresses(interfaces)), there)
        return Reach((here if here and own_address(here) else address_toward(there),), there)
    except NetworkError as error:
        raise JobError(str(error), EXIT_SETUP) from error


def meeting_addresses(reaches: Sequence[Reach | None]) -> tuple[list[str], list[list[str]]]:
    """Where the key-value server listens, and which of that each host uses.

    Args:
        reaches: per host; None: this one.

    Returns:
        All addresses, and the addresses for each host. With remote hosts in the job, local ranks use the same
        addresses as those, never loopback: the route to the server is how a rank finds the address it is known by.
    """
    remote = list(dict.fromkeys(address for each in reaches if each is not None for address in each.launcher))
    if not remote:
        return [LOOPBACK], [[LOOPBACK] for _ in reaches]
    return remote, [remote if each is None else list(each.launcher) for each in reaches]
