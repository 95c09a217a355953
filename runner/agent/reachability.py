"""Whether hosts can connect to each other, for ``--check-hosts``. Nothing is read from these connections."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence

__all__ = ["listen", "unreachable"]

_BACKLOG = 4096
"""Nobody accepts: a connection has proven what it should once it waits here."""
_POLL_MS = 100


def listen() -> socket.socket:
    """Listens on a free port of all addresses of this machine.

    Raises:
        OSError: that is not possible.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=_BACKLOG)


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
