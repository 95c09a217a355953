"""The arena: one host's shared memory. The lowest rank creates it and sends it to the other ranks of the host.

Candidates are ranks with equal identity. Their leader listens on an abstract unix socket of random name. It sends the
memory and all wake-up descriptors to each authenticated member. The connections stay open, so that each end detects
the death of the other. Each member publishes whether it has received the memory, so that all ranks compute the same
grouping. A member that cannot receive it becomes a host of its own.
"""

from __future__ import annotations

import array
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from horo.bootstrap.auth.handshake import Claim, HandshakeError, HandshakeResult, Purpose, authenticate
from horo.bootstrap.host.grouping import Grouping, group_ranks
from horo.bootstrap.net.listener import ListenerThread
from horo.bootstrap.net.open_files import make_room
from horo.bootstrap.packed import pack, unpack
from horo.bootstrap.rendezvous import Rendezvous
from horo.core.memory import create_memory, create_wake
from horo.core.setup import close_all
from horo.errors import ResourceError

__all__ = ["Arena", "check_user", "join_arena", "receive_descriptors", "send_descriptors"]

_CHUNK = 250
"""Descriptors per message; the kernel takes at most 253."""
_COUNT = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
_SEND_TIMEOUT_S = 10.0
"""Longest time for which one member may hold up the leader, and with it the members behind."""
_STRANGERS_QUEUED = 512
"""Connections of other users that may wait to be closed while all members are in the queue."""
_RETRY_S = 0.001
_TOPIC = "arena"
_OUTCOME = "joined"


@dataclass
class Arena:
    """One rank's descriptors of its host's shared memory. A context may take them over; else ``close`` closes them."""

    memory: int
    wakes: list[int]
    """By local index; none in a job of one host, whose ranks are woken through the memory."""
    lives: list[int] = field(default_factory=list)
    """Connections that end when a peer dies, by local index; -1 for none."""
    board: int = -1
    """Memory for the steps of the ranks, see ``horo/diagnostics/board.py``; -1: none. No context takes it over."""

    def close(self) -> None:
        """Closes all descriptors."""
        close_all([self.memory, *self.wakes, *(each for each in (*self.lives, self.board) if each >= 0)])


def join_arena(
    rendezvous: Rendezvous,
    candidates: Sequence[int],
    secret: bytes,
    epoch: int,
    bytes_for: Callable[[int], int],
    *,
    board_bytes: int = 0,
) -> tuple[Arena, Grouping]:
    """Shares memory with as many of ``candidates`` as possible.

    Args:
        rendezvous: publishes the name of the leader's socket and the result of each member.
        candidates: ascending ranks that may be on this host, this one included.
        secret: the job's secret.
        epoch: number of this start; the handshake covers it.
        bytes_for: returns the bytes of shared memory for a number of ranks.
        board_bytes: those of the board for each rank; 0: without a board.

    Returns:
        This rank's arena, whose lists follow the local index in the final grouping of the job, and that grouping.

    Raises:
        ResourceError: there is not even memory for this rank alone. GroupError: as ``Rendezvous.gather``.
    """
    make_room(2 * len(candidates) + 2)  # without it, ranks share no memory, and say so
    if rendezvous.rank == candidates[0]:
        return _lead(rendezvous, candidates, secret, epoch, bytes_for, board_bytes=board_bytes)
    return _follow(rendezvous, candidates, secret, epoch, bytes_for, board_bytes=board_bytes)


def _lead(
    rendezvous: Rendezvous,
    candidates: Sequence[int],
    secret: bytes,
    epoch: int,
    bytes_for: Callable[[int], int],
    *,
    board_bytes: int,
) -> tuple[Arena, Grouping]:
    arena = _create(len(candidates), bytes_for, board_bytes)
    server = _ArenaServer(arena, rendezvous.rank, candidates, epoch) if len(candidates) > 1 else None
    try:
        if server is not None:
            rendezvous.publish(_TOPIC, _try_listen(server, rendezvous, secret))
        grouping = _agree(rendezvous, rendezvous.rank)
    except BaseException:
        if server is not None:
            server.close()
        arena.close()
        raise
    connections = server.stop() if server is not None else {}
    members = grouping.members(rendezvous.rank)
    for rank in connections.keys() - members:
        connections[rank].close()
    _keep_wakes(arena, candidates, members, grouping)
    arena.lives = [-1, *(connections[rank].detach() for rank in members[1:])]
    return arena, grouping


def _try_listen(server: _ArenaServer, rendezvous: Rendezvous, secret: bytes) -> bytes:
    """The socket's name. Empty if no socket can be made; then each member becomes a host of its own."""
    try:
        return server.listen(secret)
    except ResourceError as error:
        logging.getLogger("horo").warning("%s can share no memory: %s", rendezvous.name(rendezvous.rank), error)
        return b""


def _follow(
    rendezvous: Rendezvous,
    candidates: Sequence[int],
    secret: bytes,
    epoch: int,
    bytes_for: Callable[[int], int],
    *,
    board_bytes: int,
) -> tuple[Arena, Grouping]:
    leader = candidates[0]
    (name,) = rendezvous.gather(_TOPIC, [leader])
    claim = Claim(Purpose.ARENA, rendezvous.rank, leader, epoch)
    life = None
    try:
        received, life = _receive_arena(
            name, secret, claim, (len(candidates) + bool(board_bytes), bytes_for(len(candidates))), rendezvous.timeout_s
        )
        joined = leader
    except (OSError, HandshakeError, ResourceError) as error:
        logging.getLogger("horo").warning(
            "%s shares no memory with %s and talks to it as to another host: %s",
            rendezvous.name(rendezvous.rank),
            rendezvous.name(leader),
            error,
        )
        joined = rendezvous.rank
    if life is None:
        arena = _create(1, bytes_for)
    elif board_bytes:
        arena = Arena(received[0], received[2:], board=received[1])
    else:
        arena = Arena(received[0], received[1:])
    try:
        grouping = _agree(rendezvous, joined)
    except BaseException:
        arena.close()
        if life is not None:
            life.close()
        raise
    members = grouping.members(rendezvous.rank)
    arena.lives = [-1] * len(members)
    if life is not None:
        _keep_wakes(arena, candidates, members, grouping)
        arena.lives[0] = life.detach()
    return arena, grouping


def _keep_wakes(arena: Arena, candidates: Sequence[int], members: Sequence[int], grouping: Grouping) -> None:
    """Closes what the grouping does without; before it, ``arena`` has one for each candidate."""
    used = members if len(grouping.hosts) > 1 else ()
    kept = [arena.wakes[candidates.index(rank)] for rank in used]
    close_all(set(arena.wakes).difference(kept))
    arena.wakes = kept


def _create(count: int, bytes_for: Callable[[int], int], board_bytes: int = 0) -> Arena:
    memory = create_memory(bytes_for(count))
    wakes: list[int] = []
    boards: list[int] = []
    try:
        if count > 1 and board_bytes:
            boards.append(create_memory(count * board_bytes))
        for _ in range(count):
            wakes.append(create_wake())
    except ResourceError:
        close_all([memory, *boards, *wakes])
        raise
    return Arena(memory, wakes, [-1], *boards)


def _agree(rendezvous: Rendezvous, joined: int) -> Grouping:
    said = rendezvous.share(_OUTCOME, b"%d" % joined, lambda leaders: pack(group_ranks(leaders).host_of_rank))
    return Grouping(tuple(unpack(said)))


class _ArenaServer:
    """The leader's side: sends the arena to each authenticated candidate that belongs to the same user."""

    def __init__(self, arena: Arena, leader: int, candidates: Sequence[int], epoch: int) -> None:
        self._descriptors = [arena.memory, *([arena.board] if arena.board >= 0 else []), *arena.wakes]
        self._leader = leader
        self._candidates = set(candidates) - {leader}
        self._epoch = epoch
        self._listener: ListenerThread | None = None
        self._connections: dict[int, socket.socket] = {}

    def listen(self, secret: bytes) -> bytes:
        """Starts serving and returns the socket's abstract name."""
        name = b"\0horo-" + secrets.token_hex(16).encode()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(name)
            listener.listen(len(self._candidates) + _STRANGERS_QUEUED)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise ResourceError(f"cannot listen on an abstract unix socket: {error.strerror}") from error
        log = logging.getLogger("horo")
        self._listener = ListenerThread(
            [listener], secret, admit=self._admit, on_peer=self._serve, on_refused=log.warning, screen=check_user
        )
        return name

    def stop(self) -> dict[int, socket.socket]:
        """Stops serving; returns the connections by rank, which the caller then owns."""
        if self._listener is not None:
            self._listener.close()
        connections, self._connections = self._connections, {}
        return connections

    def close(self) -> None:
        """Stops serving and closes the connections."""
        for connection in self.stop().values():
            connection.close()

    def _admit(self, connection: socket.socket, handshake: HandshakeResult) -> None:
        claim = handshake.claim
        if claim.purpose is not Purpose.ARENA or claim.target != self._leader or claim.epoch != self._epoch:
            raise HandshakeError("it looks for somebody else's shared memory")
        if claim.source not in self._candidates or claim.source in self._connections:
            raise HandshakeError(f"rank {claim.source} is not expected here (any more)")

    def _serve(self, connection: socket.socket, handshake: HandshakeResult) -> None:
        try:
            connection.settimeout(_SEND_TIMEOUT_S)
            send_descriptors(connection, self._descriptors)
            connection.setblocking(False)
        except OSError:
            connection.close()  # the member sees this and publishes it
            return
        self._connections[handshake.claim.source] = connection


def _receive_arena(
    name: bytes, secret: bytes, claim: Claim, expected: tuple[int, int], timeout_s: float
) -> tuple[list[int], socket.socket]:
    """Receives the leader's descriptors: memory, the board, then wake-ups. Returns them and the connection.

    ``expected`` are their number but for the memory, and the bytes that the memory has at least.
    """
    count, byte_count = expected
    deadline = time.monotonic() + timeout_s
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    received: list[int] = []
    try:
        if not name:
            raise ResourceError("its leader has no socket to pass it over")
        connection.settimeout(timeout_s)
        _connect(connection, name, deadline)
        check_user(connection)
        authenticate(connection, secret, claim, deadline)
        connection.settimeout(timeout_s)
        received = receive_descriptors(connection, count + 1)
        held = os.fstat(received[0]).st_size
        if held < byte_count:
            raise ResourceError(f"the shared memory has {held} bytes, {byte_count} are needed")
        connection.setblocking(False)
    except BaseException:
        close_all(received)
        connection.close()
        raise
    return received, connection


def _connect(connection: socket.socket, name: bytes, deadline: float) -> None:
    """Connects to an abstract unix socket. Retries while its queue is full: any process on the host may fill it.

    Raises:
        OSError: the queue was full until ``deadline`` (on ``time.monotonic()``), or no process listens there.
    """
    while True:
        try:
            connection.connect(name)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_RETRY_S)


def check_user(connection: socket.socket) -> None:
    """Refuses a process of another user at the other end of a unix socket.

    Raises:
        HandshakeError: it is one.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    if user != os.getuid():
        raise HandshakeError(f"it belongs to user {user}, this rank to user {os.getuid()}")


def send_descriptors(connection: socket.socket, descriptors: Sequence[int]) -> None:
    """Sends any number of descriptors over a connected unix stream socket."""
    connection.sendall(_COUNT.pack(len(descriptors)))
    for start in range(0, len(descriptors), _CHUNK):
        socket.send_fds(connection, [b"D"], list(descriptors[start : start + _CHUNK]))


def receive_descriptors(connection: socket.socket, count: int) -> list[int]:
    """Exactly ``count`` descriptors from ``send_descriptors``, close-on-exec.

    Raises:
        ResourceError: fewer came, for example because this process may not open more.
        OSError: the connection broke, or no data came within its timeout.
    """
    header = connection.recv(_COUNT.size, socket.MSG_WAITALL)
    if len(header) < _COUNT.size or _COUNT.unpack(header)[0] != count:
        raise ResourceError(f"{count} descriptors were expected, the leader sent {header.hex() or 'nothing'}")
    received: list[int] = []
    try:
        while len(received) < count:
            room = socket.CMSG_SPACE(array.array("i").itemsize * _CHUNK)
            data, ancillary, flags, _ = connection.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
            before = len(received)
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                    received += numbers
            if not data or flags & socket.MSG_CTRUNC or len(received) == before:
                raise ResourceError(
                    f"only {len(received)} of {count} descriptors of the shared memory could be taken "
                    "(limit of open files?)"
                )
    except BaseException:
        close_all(received)
        raise
    return received
