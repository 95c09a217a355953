"""Mutual authentication of both ends of a connection by the job's secret, which is never sent.

    dialer   -> acceptor   HELLO    magic, version, purpose, number, from, to, epoch, team, address, port, nonce
    acceptor -> dialer     ANSWER   magic, version, nonce, MAC("accept")
    dialer   -> acceptor   PROOF    MAC("dial")
    acceptor -> dialer     WELCOME  one byte

An acceptor that has no descriptor left answers FULL at once, an ANSWER of version 0, and hangs up.

Every MAC is HMAC-SHA256 under the job's secret over a label for the role, the whole HELLO and the acceptor's nonce. So
it is valid for one connection, one direction, one purpose, team and number and one pair of ranks only. Address and port
are those to which the dialer has connected, and must equal the acceptor's own: a process in between has another address
and therefore cannot relay the handshake and keep the connection. The acceptor reads exactly these bytes: all that
follow on the connection belong to its user.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from horo.errors import HoroError, UsageError

__all__ = [
    "FULL",
    "SECRET_BYTES",
    "SECRET_BYTES_MIN",
    "WELCOME",
    "Acceptor",
    "Claim",
    "HandshakeError",
    "HandshakeResult",
    "Purpose",
    "authenticate",
    "check_secret",
]

SECRET_BYTES_MIN = 16
SECRET_BYTES = 32
"""Length of a secret that horo makes."""
WELCOME = b"\x01"
_MAGIC = b"HORO"
_VERSION = 3
_NONCE_BYTES = 32
_MAC_BYTES = 32
_HELLO = struct.Struct("!4sBBBxIIII16sH32s")
_ANSWER = struct.Struct("!4sB3x32s32s")
FULL = _ANSWER.pack(_MAGIC, 0, bytes(_NONCE_BYTES), bytes(_MAC_BYTES))


class HandshakeError(HoroError):
    """The other end is not a member of this job, or not the expected one.

    ``reply`` is the message to send before closing the connection, so that the other end can name the reason too.
    """

    def __init__(self, message: str, reply: bytes = b"") -> None:
        super().__init__(message)
        self.reply = reply


class Purpose(IntEnum):
    """The purpose of a connection; the MACs cover it."""

    STORE = 1
    ARENA = 2
    CONTROL = 3
    DATA = 4


@dataclass(frozen=True)
class Claim:
    """The dialer's description of the connection; every MAC covers it."""

    purpose: Purpose
    source: int = 0
    target: int = 0
    epoch: int = 0
    number: int = 0
    """Number of the connection among those with this purpose between these ranks; at most 255."""
    team: int = 0
    """The team whose connection it is; 0: all ranks of the job."""


@dataclass(frozen=True)
class HandshakeResult:
    """The result of a handshake: the claim that was proven, and one key per direction."""

    claim: Claim
    send_key: bytes = field(repr=False)
    receive_key: bytes = field(repr=False)


def check_secret(secret: bytes) -> None:
    """Raises UsageError for a secret that could be guessed."""
    if len(secret) < SECRET_BYTES_MIN:
        raise UsageError(f"the job's secret has {len(secret)} bytes, at least {SECRET_BYTES_MIN} are needed")


def _mac(secret: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, b"horo " + label + b"\0" + transcript, "sha256")


def _packed(sockaddr: Any) -> tuple[bytes, int]:
    """Address and port in the form of HELLO; zeros for a Unix socket, whose ends are on one host and of one user."""
    if not isinstance(sockaddr, tuple):
        return bytes(16), 0
    address = ipaddress.ip_address(str(sockaddr[0]).partition("%")[0])
    mapped = bytes(10) + b"\xff\xff" if address.version == 4 else b""
    return mapped + address.packed, int(sockaddr[1])


def _endpoint(packed: bytes, port: int) -> str:
    """Address and port as text, for messages."""
    address = ipaddress.IPv6Address(packed)
    return f"{address.ipv4_mapped}:{port}" if address.ipv4_mapped else f"[{address}]:{port}"


class Acceptor:
    """The accepting side of the handshake, without I/O: the caller feeds received bytes and sends returned bytes.

    Args:
        secret: the job's secret.
        reached: the local address of the connection, from ``getsockname()``.
    """

    def __init__(self, secret: bytes, reached: Any = "") -> None:
        self._secret = secret
        self._reached = _packed(reached)
        self._received = b""
        self._transcript = b""
        self._claim: Claim | None = None
        self.result: HandshakeResult | None = None
        """Set once the dialer is authenticated; the caller then sends WELCOME."""

    @property
    def missing_bytes(self) -> int:
        """Most bytes to read next; further bytes belong to the user of the connection."""
        whole = _HELLO.size if self._claim is None else _MAC_BYTES
        return whole - len(self._received)

    def feed(self, data: bytes) -> bytes:
        """Takes at most ``missing_bytes`` received bytes and returns the bytes to send now.

        Raises:
            HandshakeError: the dialer is no member of the job.
        """
        self._received += data
        if self._claim is None and not _MAGIC.startswith(self._received[: len(_MAGIC)]):
            raise HandshakeError("it sent no handshake of horo")
        if self.missing_bytes > 0:
            return b""
        message, self._received = self._received, b""
        if self._claim is None:
            return self._answer(message)
        self._finish(message)
        return b""

    def _answer(self, hello: bytes) -> bytes:
        _, version, purpose, number, source, target, epoch, team, address, port, _ = _HELLO.unpack(hello)
        if version != _VERSION:
            raise HandshakeError(
                f"it speaks version {version} of the handshake, this side version {_VERSION}",
                reply=_ANSWER.pack(_MAGIC, _VERSION, bytes(_NONCE_BYTES), bytes(_MAC_BYTES)),
            )
        if (address, port) != self._reached:
            raise HandshakeError(
                f"it has connected to {_endpoint(address, port)} and has come out at {_endpoint(*self._reached)}: "
                "addresses are translated on the way, or another process passes its connection on"
            )
        try:
            self._claim = Claim(Purpose(purpose), source, target, epoch, number, team)
        except ValueError:
            raise HandshakeError(f"its handshake asks for the unknown purpose {purpose}") from None
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._transcript = hello + nonce
        return _ANSWER.pack(_MAGIC, _VERSION, nonce, _mac(self._secret, b"accept", self._transcript))

    def _finish(self, proof: bytes) -> None:
        if self._claim is None or not hmac.compare_digest(proof, _mac(self._secret, b"dial", self._transcript)):
            raise HandshakeError("it does not know the job's secret")
        self.result = HandshakeResult(
            self._claim,
            send_key=_mac(self._secret, b"acceptor key", self._transcript),
            receive_key=_mac(self._secret, b"dialer key", self._transcript),
        )


def authenticate(connection: socket.socket, secret: bytes, claim: Claim, deadline: float) -> HandshakeResult:
    """The dialing side of the handshake, on a connected socket.

    Args:
        connection: any stream socket; its timeout is changed.
        deadline: on ``time.monotonic()``.

    Raises:
        HandshakeError: the acceptor is no member of the job, refused this claim, or did not answer by the deadline.
    """
    place = (claim.purpose, claim.number, claim.source, claim.target, claim.epoch, claim.team)
    try:
        reached = _packed(connection.getpeername())
        hello = _HELLO.pack(_MAGIC, _VERSION, *place, *reached, secrets.token_bytes(_NONCE_BYTES))
        connection.sendall(hello)
        answer = _receive(connection, _ANSWER.size, deadline)
        if answer == FULL:
            raise HandshakeError("the process there can open no further file: its limit is too low (ulimit -n)")
        magic, version, nonce, mac = _ANSWER.unpack(answer)
        if magic != _MAGIC:
            raise HandshakeError("the listener there is not horo's")
        if version != _VERSION:
            raise HandshakeError(f"the listener there speaks version {version} of the handshake, this side {_VERSION}")
        transcript = hello + nonce
        if not hmac.compare_digest(mac, _mac(secret, b"accept", transcript)):
            connection.sendall(bytes(_MAC_BYTES))  # no proof, so that the other side can name the reason, too
            raise HandshakeError("the listener there does not know the job's secret")
        connection.sendall(_mac(secret, b"dial", transcript))
        if _receive(connection, len(WELCOME), deadline) != WELCOME:
            raise HandshakeError("the listener there answered the proof with something that is no welcome")
    except TimeoutError as error:
        raise HandshakeError("the listener there did not finish the handshake in time") from error
    except OSError as error:
        raise HandshakeError(f"the connection broke during the handshake ({error.strerror})") from error
    return HandshakeResult(
        claim,
        send_key=_mac(secret, b"dialer key", transcript),
        receive_key=_mac(secret, b"acceptor key", transcript),
    )


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    received = b""
    while len(received) < count:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        data = connection.recv(count - len(received))
        if not data:
            raise HandshakeError(
                "the listener there closed the connection during the handshake (another job's secret, or addresses "
                "that are translated on the way?)"
            )
        received += data
    return received
