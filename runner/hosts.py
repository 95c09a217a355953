"""Hosts as users write them: the value of ``-H`` and the lines of a host file.

One host is ``[user@]name[:slots][:port=P]`` after ``-H`` (several separated by commas) and
``[user@]name[:slots] [slots=N] [port=P]`` on a line of a host file, where ``#`` starts a comment. A numeric IPv6
address stands in brackets, ``[::1]:4``; on a line with ``slots=`` it may stand alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

__all__ = ["HostSpec", "HostsError", "is_host_name", "parse_host_file", "parse_hosts", "written"]


class HostsError(ValueError):
    """A host that cannot be understood; the message names the text at fault."""


@dataclass(frozen=True)
class HostSpec:
    """A host as the user names it.

    Attributes:
        name: what ``HOROVOD_HOSTNAME`` says and ssh connects to: a host name, an ssh alias, a numeric address.
        user: the user to log in as; None: as ssh decides.
        port: the port of its ssh; None: as ssh decides.
        slots: how many ranks it takes; None: its GPUs, or its cores where it has none.
    """

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None


_HOST = re.compile(
    r"""(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?
        (?:\[(?P<address>[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?)\]|(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*))
        (?P<rest>(?::[^:]*)*)""",
    re.VERBOSE,
)
_BARE_IPV6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[A-Za-z0-9_.-]+)?")
_FORM = "[user@]host[:slots][:port=P], with a numeric IPv6 address in brackets"


def is_host_name(text: str) -> bool:
    """Whether it can be a name or an IPv4 address; nothing that a program could take for an option."""
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", text) is not None


def parse_hosts(text: str) -> tuple[HostSpec, ...]:
    """The value of ``-H``: hosts separated by commas, in order; a host named twice gets the sum of its slots.

    Raises:
        HostsError: an item is not a host.
    """
    items = [item.strip() for item in text.split(",")]
    if not any(items):
        raise HostsError(f"-H {text!r} names no host: write {_FORM}")
    if not all(items):
        raise HostsError(f"-H {text!r} has a comma without a host: write one comma between two hosts")
    try:
        return _merge(_parse_item(item) for item in items)
    except HostsError as error:
        raise HostsError(f"-H {text!r}: {error}") from None


def parse_host_file(text: str, path: str) -> tuple[HostSpec, ...]:
    """The text of a host file; ``path`` is for messages.

    Raises:
        HostsError: a line is not a host (the message has its number and text), or there is none.
    """
    hosts: list[HostSpec] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        try:
            hosts = list(_merge([*hosts, _parse_line(content)]))
        except HostsError as error:
            raise HostsError(f"{path}, line {number}, {line.strip()!r}: {error}") from None
    if not hosts:
        raise HostsError(f"{path} names no host: write one per line, like 'h1 slots=4'")
    return tuple(hosts)


def written(hosts: Iterable[HostSpec]) -> str:
    """Hosts and their slots as one would write them after ``-H``."""
    return ",".join(host.name if host.slots is None else f"{host.name}:{host.slots}" for host in hosts)


def _parse_line(content: str) -> HostSpec:
    first, *words = content.split()
    host = HostSpec(first) if words and _BARE_IPV6.fullmatch(first) else _parse_item(first)
    for word in words:
        host = _with_key(host, word)
    return host


def _parse_item(item: str) -> HostSpec:
    if _BARE_IPV6.fullmatch(item.rpartition("@")[2]):
        raise HostsError(f"{item!r} could end in an address or in slots: write the address in brackets, [::1]:4")
    match = _HOST.fullmatch(item)
    if match is None:
        raise HostsError(f"{item!r} is not a host: write {_FORM}")
    host = HostSpec(match["address"] or match["name"], user=match["user"])
    for word in match["rest"].split(":")[1:]:
        host = _with_key(host, word if "=" in word else f"slots={word}")
    return host


def _with_key(host: HostSpec, word: str) -> HostSpec:
    key, equals, value = word.partition("=")
    if key not in {"slots", "port"} or not equals:
        raise HostsError(f"{word!r} is not understood after the host: only slots=N and port=P are")
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) == 0:
        raise HostsError(f"{key} of {host.name}, {value!r}, must be a whole number from 1 on")
    if key == "port":
        if int(value) > 65535:
            raise HostsError(f"port {value} must be at most 65535")
        if host.port is not None:
            raise HostsError(f"port is given twice: {host.port} and {value}")
        return replace(host, port=int(value))
    if host.slots is not None:
        raise HostsError(f"slots are given twice: {host.slots} and {value}")
    return replace(host, slots=int(value))


def _merge(hosts: Iterable[HostSpec]) -> tuple[HostSpec, ...]:
    merged: dict[str, HostSpec] = {}
    for host in hosts:
        earlier = merged.get(host.name)
        if earlier is None:
            merged[host.name] = host
        elif (earlier.user, earlier.port) != (host.user, host.port):
            raise HostsError(f"{host.name} is named twice with different users or ports")
        elif earlier.slots is None or host.slots is None:
            raise HostsError(f"{host.name} is named twice: say its slots each time, or name it once")
        else:
            merged[host.name] = replace(earlier, slots=earlier.slots + host.slots)
    return tuple(merged.values())
