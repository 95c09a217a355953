"""Makes the links of a team, which is some ranks of a job, while the job runs.

A team has its own numbers: a member's rank is its position among the members, hosts are numbered by their lowest
member, and a member's local index is its position among the members on its host. The links are those that a job of
these ranks would have. All ranks of the job take part in the exchanges, members or not, so that all get one result:

1. Every rank sends a digest of the team; members that accept links also send their endpoints. Then members connect.
2. Every rank reports whether it has all its links, again and again until all have: a rank that still waits for links
   takes part twice a second.

A rank that fails reports its error in the next exchange, and every rank raises: no rank keeps links that others lack.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from horo.bootstrap.auth.frames import pack_fields, unpack_fields
from horo.bootstrap.directory import Directory
from horo.bootstrap.host.grouping import Grouping, group_ranks
from horo.bootstrap.links import Links, by_host
from horo.bootstrap.net.addresses import Endpoint, parse_endpoints
from horo.bootstrap.rendezvous import error_of_peer, kind_and_reason, list_ranks
from horo.core.setup import close_all
from horo.errors import InternalError, MismatchError, TimeoutError, UsageError

__all__ = ["Exchange", "TeamLinks", "connect_team"]

Exchange = Callable[[bytes], Sequence[bytes]]
"""A collective of all ranks of the job: takes this rank's message, returns the messages of all, by rank. May raise."""

_NUMBER_MAX = (1 << 32) - 1
_WAITS, _DONE = b"waits", b"done"
_REPORT_S = 0.5
"""The time after which a rank that still waits for links reports so again, and hears whether another has failed."""


@dataclass(frozen=True)
class TeamLinks:
    """A member's place in a team and its links there, which the caller owns; ``close`` closes them all."""

    number: int
    """Number of the team in the job."""
    members: tuple[int, ...]
    """Ranks of the job, ascending."""
    rank: int
    """This process's position among them."""
    grouping: Grouping
    """Hosts of the members, by position."""
    control_fds: list[int]
    """By host of the team, as in ``Setup``; -1 for none."""
    data_fds: list[int]
    """Socket ``i`` to a host of the team is at ``host * sockets_per_peer + i``, as in ``Setup``; -1 for none."""

    def close(self) -> None:
        """Closes all descriptors. It must not be called after another owner, such as the core, has taken them over."""
        close_all(number for number in (*self.control_fds, *self.data_fds) if number >= 0)


def connect_team(
    directory: Directory,
    number: int,
    members: Sequence[int],
    exchange: Exchange,
    check: Callable[[], None] = lambda: None,
) -> TeamLinks | None:
    """Makes the links of a team. All ranks of the job, members or not, call it at the same time with the same team.

    Waits for connections at most ``directory.timeout_s`` without progress, and for an exchange as long as that takes.

    Args:
        directory: the directory of the job.
        number: 1 to 2^32 - 1, used for no other team of this start.
        members: ranks of the job, ascending.
        exchange: called at least twice, or once if the first step fails.
        check: called every few seconds or more often while connections are awaited; raises to give up.

    Returns:
        This rank's place and links; None on a rank that is no member.

    Raises:
        TimeoutError: a member could not be reached, or did not connect; names it and its addresses.
        MismatchError: ranks have passed different teams.
        UsageError, ResourceError: the team is not valid, or there is no address to listen on.
        AbortedError, PeerLostError: another rank failed; the message names it and the reason.
        Others: as ``exchange`` and ``check``. Nothing is left open then.
    """
    setup = _TeamSetup(directory, number, members, exchange, check)
    try:
        setup.listen()
        setup.connect()
    except BaseException:
        setup.abort()
        raise
    return setup.finish()


class _TeamSetup:
    """The steps of one rank that make the links of one team. It is the ``LinkGroup`` of its ``Links``."""

    def __init__(
        self,
        directory: Directory,
        number: int,
        members: Sequence[int],
        exchange: Exchange,
        check: Callable[[], None],
    ) -> None:
        self.rank, self.timeout_s = directory.rank, directory.timeout_s
        self.name, self.names = directory.name, directory.names
        self._exchange, self._check = exchange, check
        self._has_failed = False
        self._report_s = 0.0
        self._directory = directory
        self._number = number
        self._members = tuple(members)
        self._told = f"the process set of the ranks {list_ranks([str(member) for member in self._members])}"
        self._grouping = Grouping(())
        self._links: Links | None = None
        self._endpoints: list[list[Endpoint]] = []

    def listen(self) -> None:
        """Starts to listen, and exchanges the endpoints."""
        self._receive(self._share(self._begin_to_listen))

    def connect(self) -> None:
        """Makes the links; returns when all ranks have theirs."""
        self._report_s = time.monotonic() + _REPORT_S
        said = self._share(self._make_links)
        while any(word != _DONE for word in said):
            said = self._share(lambda: _DONE)

    def check(self) -> None:
        """Between two attempts, or in a wait: raises if the links are given up, since another rank has failed."""
        self._check()
        if time.monotonic() >= self._report_s:
            self._results(self._exchange(pack_fields([b"", _WAITS])))
            self._report_s = time.monotonic() + _REPORT_S

    def _share(self, step: Callable[[], bytes]) -> list[bytes]:
        """Runs ``step`` and returns the results of all ranks. Raises if the step failed on any rank."""
        try:
            mine = pack_fields([b"", step()])
        except BaseException as error:
            if not self._has_failed:
                kind, reason = kind_and_reason(error)
                with contextlib.suppress(Exception):  # the others may have failed too, but this error counts here
                    self._exchange(pack_fields([kind.encode(), reason.encode()]))
            raise
        return self._results(self._exchange(mine))

    def _results(self, answers: Sequence[bytes]) -> list[bytes]:
        """The answers of all ranks; raises the error of one that has failed, if there is any."""
        words = [unpack_fields(answer) for answer in answers]
        if len(words) != len(self._directory.peers):
            raise InternalError(f"{len(words)} of {len(self._directory.peers)} ranks have answered")
        failures = [(rank, failed.decode("utf-8", "replace")) for rank, (failed, _) in enumerate(words) if failed]
        if failures:
            self._has_failed = True
            # A rank that has waited in vain says less than one that knows why.
            rank, kind = min(failures, key=lambda failure: failure[1] == TimeoutError.__name__)
            reason = words[rank][1].decode("utf-8", "replace")
            raise error_of_peer(
                kind,
                f"the links of {self._told} were given up because another rank failed: {self.name(rank)}: {reason}",
            )
        return [value for _, value in words]

    def _begin_to_listen(self) -> bytes:
        """Starts to listen; returns this rank's first message, with a digest of the team and the endpoints."""
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

    def _receive(self, said: Sequence[bytes]) -> None:
        """Checks and stores the first messages of all ranks. All ranks have the same ones, so all raise or none."""
        words = [unpack_fields(word) for word in said]
        for rank, (team, told, _) in enumerate(words):
            if team != words[0][0]:
                raise MismatchError(
                    f"{self.name(0)} adds {words[0][1].decode()}, {self.name(rank)} adds "
                    f"{told.decode()}; all ranks must add the same process sets in the same order"
                )
        self._endpoints = [parse_endpoints(where.decode()) if where else [] for _, _, where in words]

    def _make_links(self) -> bytes:
        """Makes this rank's links."""
        if self._links is not None:
            self._links.dial(self._endpoints.__getitem__)
            self._links.wait()
        return _DONE

    def finish(self) -> TeamLinks | None:
        """Stops listening; returns the links, None on a rank that is no member."""
        if self._links is None:
            return None
        control, data = by_host(self._links.finish(), len(self._grouping.hosts), self._directory.sockets_per_peer)
        place = self._members.index(self.rank)
        return TeamLinks(self._number, self._members, place, self._grouping, control, data)

    def abort(self) -> None:
        """Closes all listeners and sockets."""
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
