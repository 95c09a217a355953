"""Checks, formats and binds numeric network addresses. No function here uses a name server."""

from __future__ import annotations

import ipaddress
import random
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from horo.errors import ResourceError, UsageError

__all__ = ["CHECK_HOSTS", "Endpoint", "bind_all", "parse_endpoints", "socket_address"]

CHECK_HOSTS = "`hororun --check-hosts -H HOST,HOST` tries the connections between hosts"
"""For errors about a connection between two hosts that does not come about."""
_SAME_PORT_ATTEMPTS = 16
_BACKLOG = 4096


class Endpoint(NamedTuple):
    """A numeric address and a TCP port."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def socket_address(address: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Family and socket address of a numeric address, IPv6 scopes (``fe80::1%eth0``) included.

    Raises:
        UsageError: ``address`` is a name, not an address, or its scope does not exist here.
    """
    try:
        ipaddress.ip_address(address)
        found = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        )
    except (ValueError, OSError) as error:
        raise UsageError(f"{address!r} is not a numeric IPv4 or IPv6 address of this machine's networks") from error
    family, _, _, _, sockaddr = found[0]
    return family, sockaddr


def parse_endpoints(text: str) -> list[Endpoint]:
    """Reads ``"10.0.0.1:4711,[fd00::1]:4711"``.

    Raises:
        UsageError: an item is no numeric address with a port from 1 to 65535.
    """
    return [_parse_endpoint(item.strip(), text) for item in text.split(",")]


def _parse_endpoint(item: str, text: str) -> Endpoint:
    address, colon, port = item.rpartition(":")
    if address.startswith("[") and address.endswith("]"):
        address = address[1:-1]
    elif ":" in address:
        colon = ""
    valid = colon and port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536
    try:
        ipaddress.ip_address(address)
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(f"{item!r} in {text!r} is not ADDRESS:PORT with a numeric address (IPv6 in brackets)")
    return Endpoint(address, int(port))


def bind_all(addresses: Sequence[str], port: int = 0, ports: range | None = None) -> list[socket.socket]:
    """One listening, nonblocking socket per address, all on one port where that is possible.

    Args:
        addresses: numeric addresses of this machine; duplicates are bound once.
        port: 0 lets the system choose.
        ports: where ``port`` is 0, those of which it is to be one.

    Raises:
        ResourceError: an address cannot be bound; names it, the port and the system's reason.
    """
    wanted = list(dict.fromkeys(addresses))
    if not wanted:
        raise UsageError("no address to listen on was given")
    if port:
        return _bind_same_port(wanted, port)
    if ports is not None:
        return _bind_one_of(wanted, ports)
    for _ in range(_SAME_PORT_ATTEMPTS):
        first = _listen(wanted[0], 0)
        try:
            return [first, *_bind_same_port(wanted[1:], first.getsockname()[1])]
        except ResourceError:
            first.close()
    return _bind_same_port(wanted, 0)


def _bind_one_of(addresses: Sequence[str], ports: range) -> list[socket.socket]:
    failure: Exception | None = None
    for port in random.SystemRandom().sample(ports, len(ports)):  # the program's own numbers stay as they are
        try:
            return _bind_same_port(addresses, port)
        except ResourceError as error:
            failure = error
    raise ResourceError(
        f"none of the ports {ports[0]} to {ports[-1]} (HORO_PORT_RANGE) is free here: {failure}; name a range with one "
        "port for each rank of a host and two more"
    ) from failure


def _bind_same_port(addresses: Sequence[str], port: int) -> list[socket.socket]:
    bound: list[socket.socket] = []
    try:
        for address in addresses:
            bound.append(_listen(address, port))
    except BaseException:
        for listener in bound:
            listener.close()
        raise
    return bound


def _listen(address: str, port: int) -> socket.socket:
    family, sockaddr = socket_address(address, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(sockaddr)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        where = f"{Endpoint(address, port)}" if port else f"{address} (any port)"
        raise ResourceError(f"cannot listen on {where}: {error.strerror}") from error
    return listener
