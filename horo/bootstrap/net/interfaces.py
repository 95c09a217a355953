"""Chooses the addresses of this machine that lead to the other hosts."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence

from horo.bootstrap.net.addresses import socket_address
from horo.errors import ResourceError, UsageError

__all__ = [
    "LOOPBACK",
    "check_interfaces",
    "connect_source",
    "interface_addresses",
    "is_loopback",
    "listen_addresses",
    "route_source",
    "select_addresses",
]

LOOPBACK = "127.0.0.1"
_DISCARD_PORT = 9

_HEADER, _MESSAGE, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("=HH")
"""Of ``linux/netlink.h``, ``linux/if_addr.h`` and ``linux/rtnetlink.h``; sizes are rounded up to four bytes."""
_GET, _NEW, _ERROR, _DUMP = 22, 20, 2, 0x301
_ADDRESS, _LOCAL, _LABEL = 1, 2, 3
_SCOPE_LINK = 253
_ANSWER_S = 10.0


def is_loopback(address: str) -> bool:
    """Whether a numeric address is one of loopback; an IPv4-mapped IPv6 address counts as IPv4."""
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def route_source(target: str) -> str | None:
    """As ``connect_source``, but None without a route."""
    try:
        return connect_source(target)
    except OSError:
        return None


def connect_source(target: str) -> str:
    """The source address of packets from this machine to ``target``, a numeric address. Sends nothing.

    Raises:
        OSError: there is no route. UsageError: ``target`` is not a numeric address.
    """
    family, sockaddr = socket_address(target, _DISCARD_PORT)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(sockaddr)
        return str(probe.getsockname()[0])


def listen_addresses(
    own: str | None, remote: Iterable[str | None], same_machine: bool, wanted: str | None
) -> list[str]:
    """The addresses to listen on so that all peers can connect.

    Args:
        own: the local address of this rank's connection to the store, None if unknown.
        remote: the same of each peer on another machine.
        same_machine: whether a peer is on this machine.
        wanted: the user's choice of interfaces, see ``select_addresses``; if given, the other arguments do not count.

    Raises:
        UsageError: no interface matches ``wanted``. ResourceError: no address leads to the other machines.
    """
    if wanted is not None:
        return select_addresses(wanted, interface_addresses())
    targets = list(dict.fromkeys(remote))
    sources = [own, *(route_source(target) for target in targets if target is not None and not is_loopback(target))]
    chosen = list(dict.fromkeys(source for source in sources if source is not None and not is_loopback(source)))
    if not targets:
        return [LOOPBACK]
    if not chosen:
        raise ResourceError(
            "no address of this machine is known that leads to the other hosts; name the interface in "
            "HORO_NETWORK_INTERFACES"
        )
    return [*chosen, LOOPBACK] if same_machine else chosen


def interface_addresses() -> dict[str, list[str]]:
    """Numeric addresses of each interface of this machine, without link-local IPv6. Linux lists them over rtnetlink."""
    names = dict(socket.if_nameindex())
    found: dict[str, list[str]] = {name: [] for name in names.values()}
    for family, scope, index, attributes in _addresses():
        own = attributes.get(_LOCAL, attributes.get(_ADDRESS))  # the latter is the other end of a tunnel
        if own is None or family not in {socket.AF_INET, socket.AF_INET6}:
            continue
        if family == socket.AF_INET or scope != _SCOPE_LINK:
            label = attributes.get(_LABEL, b"").rstrip(b"\0").decode()  # of a second address, "eth0:1"
            found.setdefault(label or names.get(index, str(index)), []).append(socket.inet_ntop(family, own))
    return found


def _addresses() -> Iterator[tuple[int, int, int, dict[int, bytes]]]:
    """Family, scope, interface and attributes of each address."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(_ANSWER_S)
        kernel.send(_HEADER.pack(_HEADER.size + _MESSAGE.size, _GET, _DUMP, 1, 0) + _MESSAGE.pack(0, 0, 0, 0, 0))
        while True:
            answer = kernel.recv(1 << 16)
            while answer:
                size, kind, *_ = _HEADER.unpack_from(answer)
                if kind != _NEW:
                    if kind == _ERROR:
                        raise ResourceError("Linux does not list this machine's addresses (rtnetlink, RTM_GETADDR)")
                    return
                family, _, _, scope, index = _MESSAGE.unpack_from(answer, _HEADER.size)
                yield family, scope, index, dict(_attributes(answer[_HEADER.size + _MESSAGE.size : size]))
                answer = answer[_aligned(size) :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        size, kind = _ATTRIBUTE.unpack_from(data)
        yield kind, data[_ATTRIBUTE.size : size]
        data = data[_aligned(size) :]


def _aligned(size: int) -> int:
    return (size + 3) & ~3


def check_interfaces(wanted: str | None, told: str) -> None:
    """Checks the user's choice also where no other host has to be reached, so that a wrong one is found early.

    Args:
        wanted, told: as for ``select_addresses``.

    Raises:
        UsageError: as ``select_addresses``.
    """
    if wanted is not None:
        select_addresses(wanted, interface_addresses(), told)


def select_addresses(wanted: str, available: dict[str, list[str]], told: str = "") -> list[str]:
    """Selects addresses by the user's choice.

    Args:
        wanted: interface names and networks, comma-separated: ``"eth0,ib0,10.1.0.0/16"``. Those that this machine
            lacks are ignored, so one text serves hosts with different names.
        available: addresses by interface.
        told: the choice in messages, as the user has set it.

    Raises:
        UsageError: nothing matches (the message lists the addresses), or an item with a slash is no network.
    """
    told = told or f"HORO_NETWORK_INTERFACES={wanted!r}"
    items = [item.strip() for item in wanted.split(",") if item.strip()]
    chosen: list[str] = []
    for item in items:
        if item in available:
            chosen += available[item]
        else:
            chosen += _in_network(item, [address for addresses in available.values() for address in addresses], told)
    if not chosen:
        there = "; ".join(f"{name} {' '.join(addresses)}" for name, addresses in available.items() if addresses)
        raise UsageError(f"{told} matches no interface or address here, which are: {there}")
    return list(dict.fromkeys(chosen))


def _in_network(item: str, addresses: Sequence[str], told: str) -> list[str]:
    try:
        network = ipaddress.ip_network(item, strict=False)
    except ValueError:
        if "/" in item:  # no name of an interface either, on any machine
            raise UsageError(f"{told}: {item!r} is not a network; a network is written like 10.1.0.0/16") from None
        return []
    return [address for address in addresses if ipaddress.ip_address(address) in network]
