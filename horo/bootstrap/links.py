"""Makes the streams between hosts: a tree of leaders for agreement, and links between owners of equal index for data.

``grouping`` computes the pairs of hosts that have links. The rank on the higher host dials. Every listener is closed
once all links of the job are made.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from horo.bootstrap.auth.handshake import Claim, HandshakeError, HandshakeResult, Purpose
from horo.bootstrap.directory import Directory
from horo.bootstrap.host.grouping import Link
from horo.bootstrap.net.addresses import CHECK_HOSTS, Endpoint, bind_all, parse_endpoints
from horo.bootstrap.net.dial import dial
from horo.bootstrap.net.interfaces import is_loopback, listen_addresses
from horo.bootstrap.net.listener import ListenerThread
from horo.bootstrap.rendezvous import Rendezvous
from horo.errors import PeerLostError, ResourceError, TimeoutError

__all__ = ["LinkGroup", "Links", "by_host", "connect_hosts"]

_TOPIC = "listen"
_SLICE_S = 0.5
"""Longest attempt or wait between two checks whether another rank has failed."""


class LinkGroup(Protocol):
    """The ranks that make links together, from the view of one of them; implemented by ``Rendezvous``."""

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def timeout_s(self) -> float:
        """Longest wait without any progress."""

    def check(self) -> None:
        """Raises if the links can no longer be made, for example since another rank has failed."""

    def name(self, rank: int) -> str:
        """Name of a rank, for messages."""

    def names(self, ranks: Sequence[int]) -> str:
        """Names of several ranks, for messages."""


class Links:
    """The streams of this rank to other hosts: ``listen``, ``dial``, ``wait``, then ``finish``; ``abort`` at any time.

    Args:
        group: the ranks that make the links.
        directory: the directory of the job.
        links: the links of this rank; a peer is a rank of the job.
        own_host: number of this rank's host, in the numbering of ``links``.
        team: number of the team that gets the links; 0: all ranks. The handshake covers it.
    """

    def __init__(
        self, group: LinkGroup, directory: Directory, links: Sequence[Link], own_host: int, team: int = 0
    ) -> None:
        self._group = group
        self._directory = directory
        self._team = team
        self._awaited = [link for link in links if link.host > own_host]
        self._outgoing = [link for link in links if link.host < own_host]
        self._incoming = _IncomingLinks(group, self._awaited, directory.epoch, team)
        self._dialed: dict[Link, socket.socket] = {}

    def listen(self) -> list[Endpoint]:
        """Starts to accept the links from higher hosts; returns the endpoints, an empty list if there are none.

        Raises:
            UsageError, ResourceError: as ``listen_addresses`` and ``bind_all``.
        """
        if not self._awaited:
            return []
        addresses = _choose_addresses(self._directory, self._awaited)
        return self._incoming.listen(self._directory.secret, addresses, self._directory.ports)

    def dial(self, find: Callable[[int], Sequence[Endpoint]]) -> None:
        """Connects to the peers on lower hosts; ``find`` returns the endpoints of a rank, and may wait for them.

        Raises:
            TimeoutError: a rank could not be reached; names it and its addresses. Others: as ``find`` and
                ``LinkGroup.check``.
        """
        for link in self._outgoing:
            claim = Claim(
                link.purpose, self._group.rank, link.peer, self._directory.epoch, link.number, team=self._team
            )
            self._dialed[link] = _dial_link(self._group, claim, find(link.peer), self._directory)

    def wait(self) -> None:
        """Waits until the peers on higher hosts have connected; raises TimeoutError if one does not."""
        self._incoming.wait()

    def finish(self) -> dict[Link, socket.socket]:
        """Hands a nonblocking, close-on-exec TCP socket per link to the caller, once all ranks have connected."""
        connected = {**self._dialed, **self._incoming.close()}
        for connection in connected.values():
            connection.setblocking(False)
        return connected

    def abort(self) -> None:
        """Closes all listeners and sockets."""
        for connection in (*self._dialed.values(), *self._incoming.close().values()):
            connection.close()


def connect_hosts(rendezvous: Rendezvous, directory: Directory) -> Links:
    """Makes all links of this rank in the job.

    Args:
        rendezvous: publishes the addresses.
        directory: the directory of the job.

    Raises:
        TimeoutError: a rank could not be reached, or did not connect; names it and its addresses.
        AbortedError, UsageError, ResourceError: as ``Rendezvous.gather`` and ``listen_addresses``.
    """
    grouping, rank = directory.grouping, directory.rank
    links = Links(rendezvous, directory, grouping.links(rank, directory.data_sockets), grouping.host_of_rank[rank])

    def find(peer: int) -> list[Endpoint]:
        (published,) = rendezvous.gather(_TOPIC, [peer])
        return parse_endpoints(published.decode())

    try:
        endpoints = links.listen()
        if endpoints:
            rendezvous.publish(_TOPIC, ",".join(map(str, endpoints)).encode())
        links.dial(find)
        links.wait()
    except BaseException:
        links.abort()
        raise
    return links


def by_host(
    connected: Mapping[Link, socket.socket], host_count: int, sockets_per_peer: int
) -> tuple[list[int], list[int]]:
    """Detaches the descriptors of the sockets, in the order of ``Setup``: control and data. The caller owns them."""
    control, data = [-1] * host_count, [-1] * host_count * sockets_per_peer
    for link, connection in connected.items():
        if link.purpose is Purpose.CONTROL:
            control[link.host] = connection.detach()
        else:
            data[link.host * sockets_per_peer + link.number] = connection.detach()
    return control, data


def _choose_addresses(directory: Directory, awaited: Sequence[Link]) -> list[str]:
    own = directory.peers[directory.rank]
    peers = [directory.peers[link.peer] for link in awaited]
    remote = [peer.address for peer in peers if peer.machine != own.machine]
    return listen_addresses(own.address, remote, same_machine=len(remote) < len(peers), wanted=directory.interfaces)


def _dial_link(group: LinkGroup, claim: Claim, endpoints: Sequence[Endpoint], directory: Directory) -> socket.socket:
    peers = directory.peers
    if peers[claim.target].machine != peers[directory.rank].machine:
        endpoints = [endpoint for endpoint in endpoints if not is_loopback(endpoint.address)] or endpoints
    try:
        connection, _ = dial(endpoints, directory.secret, claim, group.timeout_s, group.check)
    except PeerLostError as error:  # an OSError, too
        raise TimeoutError(
            f"{group.name(claim.target)} could not be reached from {group.name(group.rank)} "
            f"(HORO_START_TIMEOUT): {error}; if these are the wrong addresses, name the right interfaces in "
            f"HORO_NETWORK_INTERFACES. {CHECK_HOSTS}"
        ) from error
    except OSError as error:  # of this process: too many open files
        raise ResourceError(f"{group.name(claim.target)} could not be dialed: {error}") from error
    return connection


class _IncomingLinks:
    """The links that ranks on higher hosts make to this rank."""

    def __init__(self, group: LinkGroup, awaited: Sequence[Link], epoch: int, team: int) -> None:
        self._group = group
        self._links = {(link.purpose, link.peer, link.number): link for link in awaited}
        self._start = epoch, team
        self._listener: ListenerThread | None = None
        self._endpoints: list[Endpoint] = []
        self._changed = threading.Condition()
        self._connected: dict[Link, socket.socket] = {}

    def listen(self, secret: bytes, addresses: Sequence[str], ports: range | None) -> list[Endpoint]:
        """Starts to accept the links, on one of ``ports``; returns the endpoints."""
        listeners = bind_all(addresses, ports=ports)
        self._endpoints = [Endpoint(*listener.getsockname()[:2]) for listener in listeners]
        log = logging.getLogger("horo")
        self._listener = ListenerThread(
            listeners, secret, admit=self._admit, on_peer=self._take, on_refused=log.warning
        )
        return self._endpoints

    def wait(self) -> None:
        """Waits for all links; raises TimeoutError after ``timeout_s`` without progress."""
        timeout_s = self._group.timeout_s
        missing: list[Link] = []
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                before = len(self._connected)
                if before < len(self._links):
                    self._changed.wait(min(_SLICE_S, max(deadline - time.monotonic(), 0)))
                missing = [link for link in self._links.values() if link not in self._connected]
                if len(self._connected) > before:
                    deadline = time.monotonic() + timeout_s
            if not missing:
                return
            self._group.check()
            if time.monotonic() >= deadline:
                names = self._group.names(sorted({link.peer for link in missing}))
                where = ", ".join(map(str, self._endpoints))
                raise TimeoutError(
                    f"{names} did not connect to {self._group.name(self._group.rank)} at {where} within "
                    f"{timeout_s:g} s (HORO_START_TIMEOUT): is a firewall between them? If these are the wrong "
                    f"addresses, name the right interfaces in HORO_NETWORK_INTERFACES. {CHECK_HOSTS}"
                )

    def close(self) -> dict[Link, socket.socket]:
        """Closes the listeners and hands the connections to the caller."""
        if self._listener is not None:
            self._listener.close()
        connected, self._connected = self._connected, {}
        return connected

    def _admit(self, connection: socket.socket, handshake: HandshakeResult) -> None:
        claim = handshake.claim
        if claim.target != self._group.rank or (claim.epoch, claim.team) != self._start:
            raise HandshakeError(f"it looks for rank {claim.target} (start {claim.epoch}, team {claim.team})")
        link = self._links.get((claim.purpose, claim.source, claim.number))
        if link is None:
            kind = Purpose(claim.purpose).name.lower()
            raise HandshakeError(f"no {kind} link (number {claim.number}) from rank {claim.source} is expected here")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _take(self, connection: socket.socket, handshake: HandshakeResult) -> None:
        claim = handshake.claim
        link = self._links[claim.purpose, claim.source, claim.number]
        with self._changed:
            # A dialer that has waited too long for the last byte of the handshake dials again: the connection that it
            # still holds counts.
            if link in self._connected and not _is_open(connection):
                connection.close()
                return
            earlier = self._connected.pop(link, None)
            if earlier is not None:
                earlier.close()
            self._connected[link] = connection
            self._changed.notify_all()


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
