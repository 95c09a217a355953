"""Hosts as users write them: the value of ``-H`` and the lines of a host file.

One host is ``[user@]name[:slots][:port=P]`` after ``-H`` (several separated by commas) and
``[user@]name[:slots] [slots=N] [max_slots=N] [port=P]`` on a line of a host file, where ``#`` starts a comment. A
numeric IPv6 address stands in brackets, ``[::1]:4``; on a line with ``slots=`` it may stand alone. A name may have
Slurm's brackets, ``n[1-4]:2``. A host file of names alone, some of them repeated, is one that PBS writes: each line is
a slot.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from horo.config.hosts import parse_host_list, split_host_list

__all__ = ["HostSpec", "HostsError", "is_host_name", "parse_host_file", "parse_hosts", "written"]


class HostsError(ValueError):
    """A host that cannot be understood; the message names the text at fault."""


@dataclass(frozen=True)
class HostSpec:
    """A host as the user names it.

    Attributes:
        name: for ``HOROVOD_HOSTNAME`` and ssh: a host name, an ssh alias, a numeric address.
        user: the user to log in as; None: as ssh decides.
        port: the port of its ssh; None: as ssh decides.
        slots: how many ranks it takes; None: its GPUs, or its cores where it has none.
        max_slots: how many it takes where hosts get more ranks than slots; None: any number.
    """

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None
    max_slots: int | None = None


_HOST = re.compile(
    r"""(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?
        (?:\[(?P<address>[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?)\]|(?P<name>[A-Za-z0-9_](?:[A-Za-z0-9_.-]|\[[0-9,-]+\])*))
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
    items = [item.strip() for item in split_host_list(text)]
    if not any(items):
        raise HostsError(f"-H {text!r} names no host: write {_FORM}")
    if not all(items):
        raise HostsError(f"-H {text!r} has a comma without a host: write one comma between two hosts")
    try:
        return _merge(host for item in items for host in _parse_item(item))
    except HostsError as error:
        raise HostsError(f"-H {text!r}: {error}") from None


def parse_host_file(text: str, path: str) -> tuple[HostSpec, ...]:
    """The text of a host file; ``path`` is for messages.

    Raises:
        HostsError: a line is not a host (the message has its number and text), or there is none.
    """
    hosts: list[HostSpec] = []
    numbers: list[int] = []
    lines = text.removeprefix("\ufeff").splitlines()
    for number, line in enumerate(lines, start=1):
        with _at(path, number, line):
            found = _parse_line(line.split("#", 1)[0].strip())
            hosts += found
            numbers += [number] * len(found)
    if not hosts:
        raise HostsError(f"{path} names no host: write one per line, like 'h1 slots=4'")
    if len({host.name for host in hosts}) < len(hosts) and all(host.slots is None for host in hosts):
        hosts = [replace(host, slots=1) for host in hosts]
    merged: dict[str, HostSpec] = {}
    for host, number in zip(hosts, numbers, strict=True):
        with _at(path, number, lines[number - 1]):
            _add(merged, host)
    return tuple(merged.values())


@contextlib.contextmanager
def _at(path: str, number: int, line: str) -> Iterator[None]:
    try:
        yield
    except HostsError as error:
        raise HostsError(f"{path}, line {number}, {line.strip()!r}: {error}") from None


def written(hosts: Iterable[HostSpec]) -> str:
    """Hosts and their slots as one would write them after ``-H``."""
    return ",".join(host.name if host.slots is None else f"{host.name}:{host.slots}" for host in hosts)


def _parse_line(content: str) -> list[HostSpec]:
    """None for a line without a host."""
    first, *words = content.split() or [""]
    if not first:
        return []
    if len(split_host_list(first)) > 1:
        raise HostsError(f"{first!r} names several hosts: write one per line")
    hosts = [HostSpec(first)] if words and _BARE_IPV6.fullmatch(first) else _parse_item(first)
    for word in words:
        hosts = [_with_key(host, word) for host in hosts]
    return hosts


def _parse_item(item: str) -> list[HostSpec]:
    """The host; several, where its name has Slurm's brackets."""
    user, at, name = item.rpartition("@")
    if _BARE_IPV6.fullmatch(name):
        raise HostsError(
            f"{item!r} is a numeric IPv6 address without brackets: write {user}{at}[{name}], or with slots "
            f"{user}{at}[{name}]:4"
        )
    if "://" in item:
        raise HostsError(f"{item!r} is a URL: write the host without {item.partition('://')[0]}://, {_FORM}")
    if any(letter.isspace() for letter in item):
        raise HostsError(f"{item!r} has a space in it: write a comma between two hosts, and slots like h1:4")
    match = _HOST.fullmatch(item)
    if match is None:
        raise HostsError(f"{item!r} is not a host: write {_FORM}")
    names = [match["address"] or match["name"]]
    if "[" in names[0]:
        try:
            names = parse_host_list(names[0])
        except ValueError as error:
            raise HostsError(str(error)) from None
    hosts = [HostSpec(each, user=match["user"]) for each in names]
    for word in match["rest"].split(":")[1:]:
        hosts = [_with_key(host, word if "=" in word else f"slots={word}") for host in hosts]
    return hosts


def _with_key(host: HostSpec, word: str) -> HostSpec:
    key, equals, value = word.partition("=")
    key = key.replace("max-slots", "max_slots")
    if key not in {"slots", "max_slots", "port"} or not equals:
        raise HostsError(f"{word!r} is not understood after the host: only slots=N, max_slots=N and port=P are")
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) == 0:
        raise HostsError(f"{key} of {host.name}, {value!r}, must be a whole number from 1 on")
    if key == "port" and int(value) > 65535:
        raise HostsError(f"port {value} must be at most 65535")
    earlier = {"slots": host.slots, "max_slots": host.max_slots, "port": host.port}[key]
    if earlier is not None:
        raise HostsError(f"{key} {'is' if key == 'port' else 'are'} given twice: {earlier} and {value}")
    if key == "port":
        return replace(host, port=int(value))
    return replace(host, slots=int(value)) if key == "slots" else replace(host, max_slots=int(value))


def _merge(hosts: Iterable[HostSpec]) -> tuple[HostSpec, ...]:
    merged: dict[str, HostSpec] = {}
    for host in hosts:
        _add(merged, host)
    return tuple(merged.values())


def _add(merged: dict[str, HostSpec], host: HostSpec) -> None:
    if host.slots is None:
        host = replace(host, slots=host.max_slots)
    elif host.max_slots is not None and host.slots > host.max_slots:
        raise HostsError(f"slots of {host.name}, {host.slots}, are more than its max_slots, {host.max_slots}")
    earlier = merged.setdefault(host.name, host)
    if earlier is host:
        return
    if (earlier.user, earlier.port) != (host.user, host.port):
        raise HostsError(f"{host.name} is named twice with different users or ports")
    if earlier.slots is None or host.slots is None:
        raise HostsError(f"{host.name} is named twice: say its slots each time, or name it once")
    most = None if None in (earlier.max_slots, host.max_slots) else (earlier.max_slots or 0) + (host.max_slots or 0)
    merged[host.name] = replace(earlier, slots=earlier.slots + host.slots, max_slots=most)
