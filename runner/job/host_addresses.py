"""Addresses of the hosts of a job, at which they connect to the key-value server and to rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from horo.bootstrap.net.interfaces import LOOPBACK
from horo.runner.config import EXIT_SETUP, Job, JobError
from horo.runner.network import (
    NetworkError,
    address_toward,
    interface_addresses,
    network_identity,
    own_address,
    resolve,
)

__all__ = ["HostAddresses", "check_interfaces", "find_addresses", "open_store", "store_addresses"]

if TYPE_CHECKING:
    from horo.bootstrap.store.server import StoreServer


@dataclass(frozen=True)
class HostAddresses:
    """Addresses between a remote host and this one.

    Attributes:
        launcher: addresses of this host that the remote host uses.
        host: address of the remote host that all others use.
    """

    launcher: tuple[str, ...]
    host: str


def check_interfaces(interfaces: Sequence[str]) -> None:
    """Checks that this host has one of them; none: that is for hororun to choose.

    Raises:
        JobError: it has none.
    """
    try:
        if interfaces:
            interface_addresses(interfaces)
    except NetworkError as error:
        raise JobError(str(error), EXIT_SETUP) from None


def find_addresses(name: str, host_info: Mapping[str, Any], interfaces: Sequence[str]) -> HostAddresses:
    """Finds the addresses from the agent's host info. Asks a name server only if ssh and srun did not tell them.

    Args:
        name: of the host, as given to ``-H``.
        host_info: from the agent.
        interfaces: interfaces and networks of this host, to be used instead of the one that routes to the peer.

    Raises:
        JobError: there is no such address.
    """
    if host_info["network"] == network_identity():
        return HostAddresses((LOOPBACK,), LOOPBACK)
    words = str(host_info["connection"]).split()
    here, there = (words[0], words[2]) if len(words) == 4 else ("", next(iter(resolve(name)), ""))
    if not there:
        raise JobError(
            f"host {name} has no address: its name is unknown here, and how it was reached is unknown there",
            EXIT_SETUP,
        )
    try:
        if interfaces:
            return HostAddresses(tuple(interface_addresses(interfaces)), there)
        return HostAddresses((here if here and own_address(here) else address_toward(there),), there)
    except NetworkError as error:
        raise JobError(str(error), EXIT_SETUP) from error


def store_addresses(hosts: Sequence[HostAddresses | None]) -> tuple[list[str], list[list[str]]]:
    """Addresses on which the key-value server listens, and those that each host uses.

    Args:
        hosts: per host; None: this one.

    Returns:
        All addresses, and the addresses for each host. With remote hosts in the job, local ranks use the same
        addresses as those, never loopback: a rank's own address is the one from which it reaches the server.
    """
    remote = list(dict.fromkeys(address for host in hosts if host is not None for address in host.launcher))
    if not remote:
        return [LOOPBACK], [[LOOPBACK] for _ in hosts]
    return remote, [remote if host is None else list(host.launcher) for host in hosts]


def open_store(job: Job, addresses: Sequence[str], secret: bytes, report: Callable[[str], None]) -> StoreServer:
    """Opens the key-value server of a job; ``report`` is called with a sentence about a refused connection.

    Raises:
        JobError: this process may not open enough files for the connections of all ranks.
    """
    from horo.bootstrap.store.server import StoreServer  # noqa: PLC0415 - --help does without

    store = StoreServer(addresses, secret, job.store_port, report, ports=job.ports, clients=job.size)
    if store.shortage:
        store.close()
        raise JobError(f"{job.size} ranks meet in hororun, which needs {store.shortage}", EXIT_SETUP)
    return store
