"""Streams between hosts: a tree of leaders for agreement, and links between owners of equal index for data.

Which hosts have them with which, ``grouping`` says. The rank on the higher host dials. Every listener closes once all
links of the job stand.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from horo._bootstrap.addresses import Endpoint, bind_all, parse_endpoints
from horo._bootstrap.dial import dial
from horo._bootstrap.gate import GateKeeper
from horo._bootstrap.grouping import Grouping, Link
from horo._bootstrap.handshake import Claim, HandshakeError, Purpose, Session
from horo._bootstrap.interfaces import is_loopback, listen_addresses
from horo._bootstrap.meeting import Meeting
from horo._errors import PeerLostError, TimeoutError

__all__ = ["Links", "Neighbour", "connect_hosts"]

_TOPIC = "listen"
_SLICE_S = 0.5
"""Longest attempt or wait before looking whether another rank has failed meanwhile."""


@dataclass(frozen=True)
class Neighbour:
    """What decides how to reach a rank."""

    machine: tuple[str, int]
    """Equal where loopback leads from one to the other."""
    address: str | None
    """From where it reaches the store; None if unknown."""


class Links:
    """The streams of this rank to other hosts; ``finish`` or ``abort`` ends the listening."""

    def __init__(self, reception: _Reception, dialed: dict[Link, socket.socket]) -> None:
        self._reception = reception
        self._dialed = dialed

    def finish(self) -> dict[Link, socket.socket]:
        """A nonblocking, close-on-exec TCP socket per link, the caller's. Call it once all ranks have connected."""
        connected = {**self._dialed, **self._reception.close()}
        for connection in connected.values():
            connection.setblocking(False)
        return connected

    def abort(self) -> None:
        """Closes everything."""
        for connection in (*self._dialed.values(), *self._reception.close().values()):
            connection.close()


def connect_hosts(
    meeting: Meeting,
    grouping: Grouping,
    neighbours: Sequence[Neighbour],
    *,
    secret: bytes,
    epoch: int,
    interfaces: str | None = None,
    data_sockets: int = 1,
) -> Links:
    """Connects this rank to those it has links to.

    Args:
        meeting: where addresses are published.
        grouping: the same on all ranks.
        neighbours: by rank.
        secret: the job's.
        epoch: number of this start; part of what is proven.
        interfaces: the user's choice of interfaces, see ``interfaces.select_addresses``.
        data_sockets: streams per link for data; 0: links for agreement only.

    Raises:
        TimeoutError: a rank could not be reached, or did not come; names it and its addresses.
        AbortedError, UsageError, ResourceError: as ``Meeting.gather`` and ``listen_addresses``.
    """
    links = grouping.links(meeting.rank, data_sockets)
    own_host = grouping.host_of_rank[meeting.rank]
    awaited = [link for link in links if link.host > own_host]
    connected = Links(_Reception(meeting, awaited, epoch), {})
    try:
        if awaited:
            addresses = _choose_addresses(meeting.rank, awaited, neighbours, interfaces)
            endpoints = connected._reception.listen(secret, addresses)
            meeting.publish(_TOPIC, ",".join(map(str, endpoints)).encode())
        for link in links:
            if link.host < own_host:
                claim = Claim(link.purpose, meeting.rank, link.peer, epoch, link.number)
                connected._dialed[link] = _dial_link(meeting, claim, neighbours, secret)
        connected._reception.wait()
    except BaseException:
        connected.abort()
        raise
    return connected


def _choose_addresses(
    rank: int, awaited: Sequence[Link], neighbours: Sequence[Neighbour], interfaces: str | None
) -> list[str]:
    own = neighbours[rank]
    peers = [neighbours[link.peer] for link in awaited]
    remote = [peer.address for peer in peers if peer.machine != own.machine]
    return listen_addresses(own.address, remote, same_machine=len(remote) < len(peers), wanted=interfaces)


def _dial_link(meeting: Meeting, claim: Claim, neighbours: Sequence[Neighbour], secret: bytes) -> socket.socket:
    (published,) = meeting.gather(_TOPIC, [claim.target])
    endpoints = parse_endpoints(published.decode())
    if neighbours[claim.target].machine != neighbours[meeting.rank].machine:
        endpoints = [endpoint for endpoint in endpoints if not is_loopback(endpoint.address)] or endpoints
    try:
        connection, _ = dial(endpoints, secret, claim, meeting.patience_s, meeting.check)
    except PeerLostError as error:
        raise TimeoutError(
            f"{meeting.name(claim.target)} could not be reached from {meeting.name(meeting.rank)} "
            f"(HORO_START_TIMEOUT): {error}; if these are the wrong addresses, name the right interfaces in "
            "HORO_NETWORK_INTERFACES"
        ) from error
    return connection


class _Reception:
    """Where the ranks of higher hosts come in."""

    def __init__(self, meeting: Meeting, awaited: Sequence[Link], epoch: int) -> None:
        self._meeting = meeting
        self._links = {(link.purpose, link.peer, link.number): link for link in awaited}
        self._epoch = epoch
        self._keeper: GateKeeper | None = None
        self._endpoints: list[Endpoint] = []
        self._changed = threading.Condition()
        self._connected: dict[Link, socket.socket] = {}

    def listen(self, secret: bytes, addresses: Sequence[str]) -> list[Endpoint]:
        """Starts to let them in; where."""
        listeners = bind_all(addresses)
        self._endpoints = [Endpoint(*listener.getsockname()[:2]) for listener in listeners]
        log = logging.getLogger("horo")
        self._keeper = GateKeeper(listeners, secret, admit=self._admit, on_peer=self._welcome, on_stranger=log.warning)
        return self._endpoints

    def wait(self) -> None:
        """Returns once all are there; raises TimeoutError after ``patience_s`` without progress."""
        patience_s = self._meeting.patience_s
        missing: list[Link] = []
        deadline = time.monotonic() + patience_s
        while True:
            with self._changed:
                before = len(self._connected)
                if before < len(self._links):
                    self._changed.wait(min(_SLICE_S, max(deadline - time.monotonic(), 0)))
                missing = [link for link in self._links.values() if link not in self._connected]
                if len(self._connected) > before:
                    deadline = time.monotonic() + patience_s
            if not missing:
                return
            self._meeting.check()
            if time.monotonic() >= deadline:
                names = self._meeting.names(sorted({link.peer for link in missing}))
                where = ", ".join(map(str, self._endpoints))
                raise TimeoutError(
                    f"{names} did not connect to {self._meeting.name(self._meeting.rank)} at {where} within "
                    f"{patience_s:g} s (HORO_START_TIMEOUT): is a firewall between them? If these are the wrong "
                    "addresses, name the right interfaces in HORO_NETWORK_INTERFACES"
                )

    def close(self) -> dict[Link, socket.socket]:
        """Closes the listeners; the connections are the caller's."""
        if self._keeper is not None:
            self._keeper.close()
        connected, self._connected = self._connected, {}
        return connected

    def _admit(self, connection: socket.socket, session: Session) -> None:
        claim = session.claim
        if claim.target != self._meeting.rank or claim.epoch != self._epoch:
            raise HandshakeError(f"it looks for rank {claim.target} (start {claim.epoch})")
        link = self._links.get((claim.purpose, claim.source, claim.number))
        if link is None:
            kind = Purpose(claim.purpose).name.lower()
            raise HandshakeError(f"no {kind} link (number {claim.number}) from rank {claim.source} is expected here")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _welcome(self, connection: socket.socket, session: Session) -> None:
        claim = session.claim
        link = self._links[claim.purpose, claim.source, claim.number]
        with self._changed:
            # A dialer that gave up waiting for the welcome dials again: the connection that it still holds counts.
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
