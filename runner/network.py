"""Addresses of this machine: which names mean it, how others reach it, free ports, whether a connection succeeds."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from horo.bootstrap.host.identity import read_identity
from horo.bootstrap.net.interfaces import LOOPBACK, connect_source, is_loopback, select_addresses
from horo.bootstrap.net.interfaces import interface_addresses as addresses_by_interface
from horo.errors import UsageError
from horo.runner.hosts import HostSpec

__all__ = [
    "NetworkError",
    "address_toward",
    "connection",
    "free_port",
    "interface_addresses",
    "is_local",
    "listen",
    "network_identity",
    "own_address",
    "own_addresses",
    "resolve",
    "unreachable",
]

T = TypeVar("T")

_BACKLOG = 4096
"""No connection is accepted: one that waits here has proven that the port is reachable."""
_POLL_MS = 100


class NetworkError(Exception):
    """An address, interface or port is not there; the message names it."""


def is_local(host: HostSpec) -> bool:
    """Whether ranks for ``host`` can be started directly: it is this machine, this user, and names no ssh port."""
    if host.port is not None or (host.user is not None and host.user != _user()):
        return False
    if host.name.lower() in {"localhost", socket.gethostname().lower()}:
        return True
    return any(own_address(address) for address in resolve(host.name))


def resolve(name: str) -> list[str]:
    """Numeric addresses of a name; none when it has none (ssh may still know it as an alias)."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def own_address(address: str) -> bool:
    """Whether this machine has the numeric address: only then can a socket be bound to it."""
    try:
        family, *_, where = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def own_addresses(interfaces: Sequence[str]) -> list[str]:
    """The addresses of this machine at which other hosts may reach it, and in the end that of loopback.

    Args:
        interfaces: those to be used; none: all.

    Raises:
        NetworkError: this machine has none of them.
    """
    if interfaces:
        found = interface_addresses(interfaces)
    else:
        found = [address for addresses in addresses_by_interface().values() for address in addresses]
    return [*(each for each in dict.fromkeys(found) if not is_loopback(each) and own_address(each)), LOOPBACK]


def address_toward(peer: str) -> str:
    """The address of this machine on its route to ``peer`` (numeric); sends nothing.

    Raises:
        NetworkError: there is no route.
    """
    try:
        return connect_source(peer)
    except OSError as error:
        raise NetworkError(f"this machine has no route to {peer}: {error.strerror}") from None
    except UsageError as error:
        raise NetworkError(str(error)) from None


def connection(environ: Mapping[str, str]) -> str:
    """The addresses over which this process was started: the launcher's, a port, this host's, a port; empty: unknown.

    ssh sets a variable of that form. srun sets the launcher's address, and the route back gives the other one.
    """
    if environ.get("SSH_CONNECTION"):
        return environ["SSH_CONNECTION"]
    launcher = environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    with contextlib.suppress(NetworkError):
        return f"{launcher} 0 {address_toward(launcher)} 0" if launcher else ""
    return ""


def interface_addresses(names: Sequence[str]) -> list[str]:
    """Numeric addresses of those of the named interfaces and networks that this machine has, link-local ones left out.

    Raises:
        NetworkError: it has none of them.
    """
    present = addresses_by_interface()
    wanted = ",".join(names)
    try:
        return select_addresses(wanted, present)
    except UsageError:
        there = "; ".join(f"{name} {' '.join(addresses)}" for name, addresses in present.items() if addresses)
        raise NetworkError(
            f"--network-interfaces {wanted}: none of them has an address here; this machine has {there}"
        ) from None


def free_port(port: int = 0, ports: range | None = None) -> int:
    """A TCP port that nobody listens on, ``port`` itself when it is not 0. It may be taken the moment after.

    Args:
        port: 0: any.
        ports: where ``port`` is 0, those of which it is to be one.

    Raises:
        NetworkError: ``port`` is taken or not allowed.
    """
    if ports is not None and not port:
        return _first_free(free_port, ports)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return int(probe.getsockname()[1])
        except OSError as error:
            raise NetworkError(f"port {port} cannot be used: {error.strerror}; choose another") from None


def network_identity() -> str:
    """Equal for two processes exactly when loopback addresses mean the same to both: boot and network namespace."""
    boot_id, network = read_identity(None).machine
    return f"{boot_id}.{network}"


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return ""


def listen(ports: range | None = None) -> socket.socket:
    """Listens on a free port of all addresses of this machine, one of ``ports`` where those are named.

    Raises:
        NetworkError, OSError: that is not possible.
    """
    return _listen(0) if ports is None else _first_free(_listen, ports)


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _first_free(take: Callable[[int], T], ports: range) -> T:
    """Calls ``take`` with the ports from the last to the first, until one is free; returns its result."""
    for port in reversed(ports):
        with contextlib.suppress(OSError, NetworkError):
            return take(port)
    raise NetworkError(
        f"none of the ports {ports[0]} to {ports[-1]} (HORO_PORT_RANGE) is free here; name a range with one port for "
        "each rank of a host and two more"
    )


def unreachable(peers: Mapping[str, Sequence[tuple[str, int]]], timeout_s: float) -> dict[str, str]:
    """Connects to all peers at once; blocks until all have answered, at most ``timeout_s`` seconds.

    Args:
        peers: the endpoints of each, of which one that answers is enough: numeric address and port.
        timeout_s: for all of them together.

    Returns:
        Why those that do not answer do not: the address, the port, the reason.
    """
    reasons: dict[str, str] = {}
    reached: set[str] = set()
    trying: dict[int, tuple[str, str, socket.socket]] = {}
    poll = select.poll()
    for name, endpoints in peers.items():
        for address, port in endpoints:
            where = f"{address} port {port}"
            try:
                family, *_, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
                probe = socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:
                reasons[name] = f"{where}: {error.strerror}"
                continue
            probe.setblocking(False)
            code = probe.connect_ex(target)
            if code not in (0, errno.EINPROGRESS):
                reasons[name] = f"{where}: {os.strerror(code)}"
                probe.close()
                continue
            trying[probe.fileno()] = name, where, probe
            poll.register(probe, select.POLLOUT)
    deadline_s = time.monotonic() + timeout_s
    while trying and time.monotonic() < deadline_s:
        for fd, _ in poll.poll(_POLL_MS):
            name, where, probe = trying.pop(fd)
            poll.unregister(fd)
            code = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            probe.close()
            if code:
                reasons[name] = f"{where}: {os.strerror(code)}"
            else:
                reached.add(name)
    for name, where, probe in trying.values():
        reasons[name] = f"{where}: no answer within {timeout_s:g} s"
        probe.close()
    return {name: reason for name, reason in reasons.items() if name not in reached}
