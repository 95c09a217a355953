"""Links for a team, which is some ranks of a job, made while the job runs.

A team numbers its own: a member's rank there is its position among the members, hosts are numbered by their lowest
member, and a member's local index is its position among the members on its host. Links are those that a job of these
ranks would have. All ranks of the job take part in two exchanges, members or not, so that all know whether the team has
its links:

1. Every rank says of which team it speaks; members that wait for others say where they listen. Then members connect.
2. Every rank says whether it has all its links.

Whoever fails says so in the exchange that is next, and every rank raises: nobody keeps links that others lack.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from horo._bootstrap.auth.frames import pack_fields, unpack_fields
from horo._bootstrap.directory import Directory
from horo._bootstrap.host.grouping import Grouping, group_ranks
from horo._bootstrap.links import Links, by_host
from horo._bootstrap.net.addresses import Endpoint, parse_endpoints
from horo._bootstrap.rendezvous import error_of_peer, kind_and_reason, list_ranks
from horo._core_setup import close_all
from horo.errors import InternalError, MismatchError, UsageError

__all__ = ["Exchange", "TeamLinks", "connect_team"]

Exchange = Callable[[bytes], Sequence[bytes]]
"""A collective of all ranks of the job: takes what this rank says, returns what each has said, by rank. May raise."""

_NUMBER_MAX = (1 << 32) - 1


@dataclass(frozen=True)
class TeamLinks:
    """A member's place in a team and its links there, which are the caller's; ``close`` closes them all."""

    number: int
    """The team's, in the job."""
    members: tuple[int, ...]
    """Ranks of the job, ascending."""
    rank: int
    """This process's position among them."""
    grouping: Grouping
    """Of the members, by position."""
    control_fds: list[int]
    """By host of the team, as in ``Setup``; -1 for none."""
    data_fds: list[int]
    """Number ``i`` to a host of the team is at ``host * sockets_per_peer + i``, as in ``Setup``; -1 for none."""

    def close(self) -> None:
        """Closes all descriptors. Not after something else, such as the core, has taken them over."""
        close_all(number for number in (*self.control_fds, *self.data_fds) if number >= 0)


def connect_team(
    directory: Directory,
    number: int,
    members: Sequence[int],
    exchange: Exchange,
    check: Callable[[], None] = lambda: None,
) -> TeamLinks | None:
    """Makes the links of a team. All ranks of the job call it at once with the same team; members and others alike.

    Waits for connections at most ``directory.timeout_s`` without progress, and for an exchange as long as that takes.

    Args:
        directory: of the job.
        number: 1 to 2^32 - 1; no other team of this start has or had it, or is being made under it.
        members: ranks of the job, ascending.
        exchange: called twice, or once where the first ends it.
        check: called every few seconds or more often while connections are awaited; raises to give up.

    Returns:
        This rank's place and links; None on a rank that is no member.

    Raises:
        TimeoutError: a member could not be reached, or did not come; names it and its addresses.
        MismatchError: ranks speak of different teams.
        UsageError, ResourceError: the team or the addresses to listen on cannot be.
        AbortedError, PeerLostError: another rank failed; says which and why.
        Others: as ``exchange`` and ``check``. Nothing is left open then.
    """
    setup = _TeamSetup(directory, number, members, check)
    try:
        setup.receive(setup.exchange(exchange, setup.listen))
        setup.exchange(exchange, setup.connect)
    except BaseException:
        setup.abort()
        raise
    return setup.finish()


class _TeamSetup:
    """One rank's part in making one team's links. It is the ``LinkGroup`` of its ``Links``."""

    def __init__(self, directory: Directory, number: int, members: Sequence[int], check: Callable[[], None]) -> None:
        self.rank, self.timeout_s = directory.rank, directory.timeout_s
        self.name, self.names, self.check = directory.name, directory.names, check
        self._directory = directory
        self._number = number
        self._members = tuple(members)
        self._told = (
            f"the process set of the ranks {list_ranks([str(member) for member in self._members])} "
            f"(number {number} to be added)"
        )
        self._grouping = Grouping(())
        self._links: Links | None = None
        self._endpoints: list[list[Endpoint]] = []

    def exchange(self, exchange: Exchange, step: Callable[[], bytes]) -> list[bytes]:
        """Does ``step`` here; what the ranks' steps have returned. An error anywhere is one here."""
        try:
            mine = pack_fields([b"", step()])
        except BaseException as error:
            kind, reason = kind_and_reason(error)
            with contextlib.suppress(Exception):  # the others may have failed too; this rank's own error counts here
                exchange(pack_fields([kind.encode(), reason.encode()]))
            raise
        answers = [unpack_fields(answer) for answer in exchange(mine)]
        if len(answers) != len(self._directory.peers):
            raise InternalError(f"{len(answers)} of {len(self._directory.peers)} ranks have answered")
        for rank, (failed, value) in enumerate(answers):
            if failed:
                reason = value.decode("utf-8", "replace")
                raise error_of_peer(
                    failed.decode("utf-8", "replace"),
                    f"the links of {self._told} were given up because another rank failed: {self.name(rank)}: {reason}",
                )
        return [value for _, value in answers]

    def listen(self) -> bytes:
        """What this rank says first: of which team it speaks, and where it listens."""
        self._check_team()
        host_of_rank = self._directory.grouping.host_of_rank
        self._grouping = group_ranks([host_of_rank[member] for member in self._members])
        endpoints: list[Endpoint] = []
        if self.rank in self._members:
            place = self._members.index(self.rank)
            links = [
                link._replace(peer=self._members[link.peer])
                for link in self._grouping.links(place, self._directory.sockets_per_peer)
            ]
            own_host = self._grouping.host_of_rank[place]
            self._links = Links(self, self._directory, links, own_host, self._number)
            endpoints = self._links.listen()
        team = hashlib.sha256(repr((self._number, self._members)).encode()).digest()
        return pack_fields([team, self._told.encode(), ",".join(map(str, endpoints)).encode()])

    def receive(self, said: Sequence[bytes]) -> None:
        """Takes in what all ranks have said first; the same on all ranks, so an error is one on all."""
        words = [unpack_fields(word) for word in said]
        for rank, (team, told, _) in enumerate(words):
            if team != words[0][0]:
                raise MismatchError(
                    f"{self.name(0)} adds {words[0][1].decode()}, {self.name(rank)} adds "
                    f"{told.decode()}; all ranks must add the same process sets in the same order"
                )
        self._endpoints = [parse_endpoints(where.decode()) if where else [] for _, _, where in words]

    def connect(self) -> bytes:
        """Makes this rank's links."""
        if self._links is not None:
            self._links.dial(self._endpoints.__getitem__)
            self._links.wait()
        return b""

    def finish(self) -> TeamLinks | None:
        """Ends the listening."""
        if self._links is None:
            return None
        control, data = by_host(self._links.finish(), len(self._grouping.hosts), self._directory.sockets_per_peer)
        place = self._members.index(self.rank)
        return TeamLinks(self._number, self._members, place, self._grouping, control, data)

    def abort(self) -> None:
        """Closes everything."""
        if self._links is not None:
            self._links.abort()

    def _check_team(self) -> None:
        size = self._directory.grouping.size
        if not 1 <= self._number <= _NUMBER_MAX:
            raise UsageError(f"a team's number is 1 to {_NUMBER_MAX}, not {self._number}")
        if not self._members or list(self._members) != sorted(set(self._members)):
            raise UsageError(f"the members of a team are ranks in ascending order, each once, not {self._members}")
        if self._members[0] < 0 or self._members[-1] >= size:
            raise UsageError(f"{self._told} has members that a job of {size} ranks does not have")
