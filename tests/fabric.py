"""Whole groups of ranks in one process, connected without any bootstrap, by slow links if the test wants it."""

import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horo.bootstrap.auth.handshake import Purpose
from horo.bootstrap.host.grouping import Grouping, control_peers, data_peers, group_ranks
from horo.core.memory import arena_bytes, create_memory, create_wake
from horo.core.setup import Setup, close_all
from horo.core.setup import close_setup as close_setup  # noqa: PLC0414 - for those who make setups

_READ_BYTES = 1 << 16
_QUEUE_BYTES = 1 << 20
"""What one direction holds back at most; then the sender meets a full link."""
_JOIN_S = 10.0
_DESCRIPTORS = Path("/proc/self/fd")


@dataclass(frozen=True)
class Relay:
    """How links are slowed; what says nothing about a kind of link leaves it as it is."""

    control_delay_s: float = 0.0
    """Every byte, and the end, arrives so much later."""
    data_delay_s: float = 0.0
    control_chunk_bytes: int = 0
    """At most so many bytes are passed on at once; 0: all there are."""
    data_chunk_bytes: int = 0
    chunk_pause_s: float = 0.0002
    """Between two chunks of a direction."""

    def of(self, purpose: Purpose) -> tuple[float, int]:
        """Delay and chunk of one kind of link."""
        if purpose is Purpose.CONTROL:
            return self.control_delay_s, self.control_chunk_bytes
        return self.data_delay_s, self.data_chunk_bytes


class _Way:
    """One direction of one link."""

    def __init__(self, source: socket.socket, target: socket.socket, delay_s: float, chunk_bytes: int, pause_s: float):
        self.source = source
        self.target = target
        self._delay_s = delay_s
        self._chunk_bytes = chunk_bytes
        self._pause_s = pause_s
        self._queue: deque[tuple[float, memoryview]] = deque()
        """When each may be passed on; without bytes: the end."""
        self._queued_bytes = 0
        self._next_s = 0.0
        self._has_ended = False
        self.is_blocked = False

    @property
    def reads(self) -> bool:
        return not self._has_ended and self._queued_bytes < _QUEUE_BYTES

    def read(self) -> None:
        try:
            data = self.source.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._has_ended = data == b""
        self._queue.append((time.monotonic() + self._delay_s, memoryview(data)))
        self._queued_bytes += len(data)

    def forward(self, now_s: float) -> float:
        """Passes on what is due; when to come again."""
        while self._queue and not self.is_blocked:
            due_s = max(self._queue[0][0], self._next_s)
            if due_s > now_s:
                return due_s
            self._pass_on(*self._queue.popleft())
            if self._chunk_bytes:
                self._next_s = now_s + self._pause_s
        return math.inf

    def _pass_on(self, due_s: float, data: memoryview) -> None:
        if not data:
            with suppress(OSError):
                self.target.shutdown(socket.SHUT_WR)
            return
        try:
            sent = self.target.send(data[: self._chunk_bytes or len(data)])
        except BlockingIOError:
            sent, self.is_blocked = 0, True
        except OSError:
            self._give_up()
            return
        self._queued_bytes -= sent
        if sent < len(data):
            self._queue.appendleft((due_s, data[sent:]))

    def _give_up(self) -> None:
        """Nobody reads there any more: the sender shall see that."""
        self._queue.clear()
        self._queued_bytes = 0
        self._has_ended = True
        with suppress(OSError):
            self.source.shutdown(socket.SHUT_RD)


class Relays:
    """All slow links of a group, served by one thread until ``close``."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._ways: list[_Way] = []
        self._wake, self._waker = os.pipe()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def connect(self, purpose: Purpose, pair: Callable[[], tuple[int, int]]) -> tuple[int, int]:
        """The two ends of a link of this kind, which ``pair`` makes; only before ``start``."""
        delay_s, chunk_bytes = self._relay.of(purpose)
        if not delay_s and not chunk_bytes:
            return pair()
        (here, near), (far, there) = pair(), pair()
        ends = [socket.socket(fileno=fd) for fd in (near, far)]
        for end in ends:
            end.setblocking(False)
        pause_s = self._relay.chunk_pause_s
        self._ways += [_Way(one, other, delay_s, chunk_bytes, pause_s) for one, other in (ends, ends[::-1])]
        return here, there

    def start(self) -> None:
        """Begins to pass bytes on."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and closes all links; raises what went wrong in the thread."""
        os.close(self._waker)
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                raise TimeoutError(f"the relay has not ended within {_JOIN_S:g} s")
        os.close(self._wake)
        for way in self._ways:
            way.source.close()  # each socket is the source of one way
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            self._error = error

    def _turn(self) -> bool:
        """False: it is time to end."""
        next_s = min([way.forward(time.monotonic()) for way in self._ways], default=math.inf)
        sources = {way.source.fileno(): way for way in self._ways if way.reads}
        targets = {way.target.fileno(): way for way in self._ways if way.is_blocked}
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        for fd in sources.keys() | targets.keys():
            poller.register(fd, (select.POLLIN if fd in sources else 0) | (select.POLLOUT if fd in targets else 0))
        for fd, events in poller.poll(self._patience_ms(next_s)):
            if fd == self._wake:
                return False
            if fd in sources and events & ~select.POLLOUT:
                sources[fd].read()
            if fd in targets and events & ~select.POLLIN:
                targets[fd].is_blocked = False
        return True

    def _patience_ms(self, next_s: float) -> float | None:
        """How long to poll; what is shorter than poll counts is slept here."""
        if next_s == math.inf:
            return None
        left_s = next_s - time.monotonic()
        if left_s < 0.001:
            time.sleep(max(left_s, 0))
            return 0
        return left_s * 1000


def make_setups(
    hosts: Sequence[int] = (2,),
    *,
    host_of_rank: Sequence[int] | None = None,
    tcp: bool = False,
    segment_bytes: int = 1 << 16,
    data_links: bool = True,
    sockets_per_peer: int = 1,
    relays: Relays | None = None,
    **options: Any,
) -> list[Setup]:
    """One setup per rank, with real memfds, eventfds and connected stream sockets.

    Every setup has descriptors of its own (duplicates), so each may be given to a context, which then owns
    them, or to ``close_setup``.

    Args:
        hosts: ranks per host, filled in order: ``[2, 2]`` puts ranks 0, 1 on the first and 2, 3 on the second.
        host_of_rank: the host of each rank instead, for ranks that are placed in turn: ``[0, 1, 0, 1]``.
        tcp: connect hosts by TCP over loopback instead of socket pairs.
        segment_bytes: size of one arena slot; small, so that tests reach several segments quickly.
        data_links: connect hosts for data too; without it only what moves none (agreement, barriers) works, with fewer
            descriptors.
        sockets_per_peer: streams per link for data.
        relays: pass on what travels between hosts; not started yet, and the caller's to end.
        options: any other field of ``Setup`` (``fusion_bytes``, ``spin_us``, ``stall_warning_ms``, ...).
    """
    if host_of_rank is None:
        host_of_rank = [host for host, count in enumerate(hosts) for _ in range(count)]
    grouping = group_ranks(host_of_rank)
    host_count = len(grouping.hosts)
    arenas: dict[int, tuple[int, list[int], list[list[int]]]] = {}
    links = _connect_hosts(grouping, tcp, sockets_per_peer if data_links else 0, relays)
    for host, members in enumerate(grouping.hosts):
        life = [[-1] * len(members) for _ in members]
        for index in range(1, len(members)):
            life[0][index], life[index][0] = _pair(tcp=False)
        wakes = [create_wake() for _ in members if host_count > 1]
        arenas[host] = (create_memory(arena_bytes(len(members), segment_bytes)), wakes, life)
    setups = []
    for rank in range(grouping.size):
        memory, wakes, life = arenas[grouping.host_of_rank[rank]]
        setups.append(
            Setup(
                rank=rank,
                size=grouping.size,
                host_of_rank=list(grouping.host_of_rank),
                host_name_of_rank=[f"host{host}" for host in grouping.host_of_rank],
                arena_fd=os.dup(memory),
                segment_bytes=segment_bytes,
                wake_fds=[os.dup(wake) for wake in wakes],
                life_fds=life[grouping.local_index(rank)],
                control_fds=[links.get((Purpose.CONTROL, rank, host, 0), -1) for host in range(host_count)],
                data_fds=[
                    links.get((Purpose.DATA, rank, host, number), -1)
                    for host in range(host_count if data_links else 0)
                    for number in range(sockets_per_peer)
                ],
                sockets_per_peer=sockets_per_peer,
                **options,
            )
        )
    for memory, wakes, _ in arenas.values():
        close_all([memory, *wakes])
    return setups


def _connect_hosts(
    grouping: Grouping, tcp: bool, data_sockets: int, relays: Relays | None
) -> dict[tuple[Purpose, int, int, int], int]:
    """Descriptor of (purpose, rank, other host, number) for every stream between hosts."""

    def pair() -> tuple[int, int]:
        return _pair(tcp)

    connected: dict[tuple[Purpose, int, int, int], int] = {}
    for rank in range(grouping.size):
        own_host = grouping.host_of_rank[rank]
        for link in grouping.links(rank, data_sockets):
            if link.host < own_host:
                here, there = pair() if relays is None else relays.connect(link.purpose, pair)
                connected[link.purpose, rank, link.host, link.number] = here
                connected[link.purpose, link.peer, own_host, link.number] = there
    return connected


def make_team_links(
    host_of_rank: Sequence[int], ranks: Sequence[int], *, tcp: bool = False, sockets: int = 1
) -> dict[int, dict[str, list[int]]]:
    """Links of a team with these members: by rank the descriptors for ``Context.add_team``, none on one host.

    Args:
        host_of_rank: of the job.
        ranks: the members, ascending.
        tcp: as for ``make_setups``.
        sockets: per peer, for data.
    """
    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(host_of_rank[rank], []).append(rank)
    places = list(members.values())
    count = len(places)
    if count == 1:
        return {rank: {} for rank in ranks}
    made = {rank: {"control_fds": [-1] * count, "data_fds": [-1] * count * sockets} for rank in ranks}
    for a in range(count):
        for b in range(a + 1, count):
            if b in control_peers(a, count):
                one, other = _pair(tcp)
                made[places[a][0]]["control_fds"][b], made[places[b][0]]["control_fds"][a] = one, other
            for i in range(min(map(len, places)) if b in data_peers(a, count) else 0):
                for n in range(sockets):
                    one, other = _pair(tcp)
                    made[places[a][i]]["data_fds"][b * sockets + n] = one
                    made[places[b][i]]["data_fds"][a * sockets + n] = other
    return made


def _pair(tcp: bool) -> tuple[int, int]:
    if not tcp:
        one, other = socket.socketpair()
        return one.detach(), other.detach()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialed = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    for end in (dialed, accepted):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return dialed.detach(), accepted.detach()


class Links:
    """Descriptors for teams that have members on several hosts, made by the first of their ranks that asks."""

    def __init__(self, host_of_rank: Sequence[int], sockets: int = 1) -> None:
        self._host_of_rank = host_of_rank
        self._sockets = sockets
        self._lock = threading.Lock()
        self._made: dict[tuple[object, tuple[int, ...]], dict[int, dict[str, list[int]]]] = {}
        self._sockets_of: dict[int, set[str]] = {}
        self._asked: dict[int, int] = {}

    def of(self, rank: int, ranks: Sequence[int], key: object = None) -> dict[str, list[int]]:
        """``control_fds`` and ``data_fds`` of a member; nothing for who is none, and for members on one host.

        ``key``: tells teams of the same ranks apart; None: by how many this rank has asked for.
        """
        self._asked[rank] = self._asked.get(rank, 0) + 1
        key = self._asked[rank] if key is None else key
        if rank not in ranks:
            return {}
        with self._lock:
            if (key, tuple(ranks)) not in self._made:
                made = make_team_links(self._host_of_rank, ranks, sockets=self._sockets)
                self._made[key, tuple(ranks)] = made
                for member, by_kind in made.items():
                    ends = [end for ends in by_kind.values() for end in ends if end >= 0]
                    self._sockets_of[member] = self._sockets_of.get(member, set()) | sockets_of(ends)
            return self._made[key, tuple(ranks)][rank]

    def sockets_of(self, rank: int) -> set[str]:
        """The names of all sockets that a rank has got. The core has duplicated and closed the descriptors, whose
        numbers may be another rank's by now.
        """
        with self._lock:
            return self._sockets_of.get(rank, set())


def sockets_of(fds: Iterable[int]) -> set[str]:
    """Names that tell sockets apart, also where their descriptors have been duplicated or closed."""
    return {str((_DESCRIPTORS / str(fd)).readlink()) for fd in fds}


def descriptors_of(sockets: Collection[str]) -> set[int]:
    """All descriptors of this process for these sockets."""
    found = set()
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # another thread has closed it
            found |= {int(entry.name)} if str(entry.readlink()) in sockets else set()
    return found
