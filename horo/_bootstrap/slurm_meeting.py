"""How ranks that srun has started meet: in a store that rank 0 hosts on the first node of the step.

Everybody derives the same few ports from the name of the start; at one of them rank 0 gives a notice of where its store
is. With ``HORO_SECRET`` in the environment the notice is signed with it. Else rank 0 draws a secret, which is in the
notice as well: that is then a credential of MUNGE, or a file in the user's home where MUNGE is not installed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from horo._bootstrap import munge
from horo._bootstrap.addresses import Endpoint, bind_all
from horo._bootstrap.hosted_store import HostedStore, choose_host_addresses
from horo._bootstrap.interfaces import LOOPBACK, is_loopback
from horo._bootstrap.launch import Launch
from horo._bootstrap.notice import NoticeServer, fetch
from horo._bootstrap.secret_file import NoteFile
from horo._bootstrap.slurm_step import SlurmStep
from horo._bootstrap.store import StoreClient, StoreServer
from horo._config import Config
from horo._errors import HoroError, InternalError, PeerLostError, ResourceError, TimeoutError, UsageError

__all__ = ["candidate_ports", "open_slurm_store"]

_SECRET_BYTES = 32
_SIGNATURE_BYTES = 32
_PORT_COUNT = 8
_PORT_FIRST, _PORT_END = 10_000, 32_000
"""Below the range from which systems choose ports for outgoing connections."""
_STALE_S = 2.0
"""How long to try the address in a file that a start before this one may have left."""


class _Note(NamedTuple):
    """What rank 0 tells: where its store is, and to those who can prove to be the same user also the secret."""

    name: str
    endpoints: list[Endpoint]
    secret: bytes = b""

    def encode(self) -> bytes:
        return json.dumps({**self._asdict(), "secret": self.secret.hex()}).encode()


def _decode(data: bytes, name: str) -> _Note | None:
    """The note of the start ``name``; None if it is damaged or another's."""
    try:
        values = json.loads(data)
        endpoints = [Endpoint(str(address), int(port)) for address, port in values["endpoints"]]
        note = _Note(str(values["name"]), endpoints, bytes.fromhex(values["secret"]))
    except (ValueError, TypeError, KeyError):
        return None
    return note if note.name == name and note.endpoints else None


def _sign(secret: bytes, note: bytes) -> bytes:
    return hmac.digest(secret, b"horo slurm note" + note, "sha256")


def candidate_ports(name: str) -> list[int]:
    """The ports at which the start ``name`` may meet; the same on all ranks, other ones for other starts."""
    span = _PORT_END - _PORT_FIRST
    digest = hashlib.sha512(name.encode()).digest()
    numbers = [int.from_bytes(digest[start : start + 4], "big") for start in range(0, len(digest), 4)]
    return list(dict.fromkeys(_PORT_FIRST + number % span for number in numbers))[:_PORT_COUNT]


def open_slurm_store(launch: Launch, config: Config, epoch: int) -> tuple[StoreClient, bytes]:
    """Meets in a store that rank 0 hosts for this one start.

    Args:
        launch: of a step of Slurm.
        config: this rank's settings.
        epoch: number of this start.

    Returns:
        A connection to the store, and the secret.

    Raises:
        TimeoutError: rank 0 was not found in time; says where it was looked for.
        UsageError: there is no way to agree on a secret; says how to give one.
        ResourceError: rank 0 has no address or free port, or the first node's name has no address.
    """
    if launch.slurm is None:
        raise InternalError(f"rank {launch.rank} is not Slurm's")
    name = f"{launch.job_id}/{epoch}"
    # Another secret for each start, so that nobody meets in the store of another step or of the start before.
    given = launch.secret and hmac.digest(launch.secret, b"horo slurm " + name.encode(), "sha256")
    if launch.rank == 0:
        return _host(launch, launch.slurm, config, name, given)
    return _Search(launch, launch.slurm, config, name, given).run()


# ---- rank 0 ---------------------------------------------------------------------------------------------------------


def _host(launch: Launch, step: SlurmStep, config: Config, name: str, given: bytes | None) -> tuple[StoreClient, bytes]:
    secret = given or secrets.token_bytes(_SECRET_BYTES)
    addresses = choose_host_addresses(config.network_interfaces, near=True, far=len(step.hosts) > 1)
    server = StoreServer(addresses, secret, on_refused=logging.getLogger("horo").warning)
    end: Callable[[], None] | None = None
    try:
        if given is not None:
            note = _Note(name, server.endpoints).encode()
            signed = _sign(given, note) + note
            end = _serve(addresses, name, lambda: signed)
        else:
            end = _offer(addresses, _Note(name, server.endpoints, secret))
        return HostedStore(server, secret, launch.size, config.start_timeout_s, end), secret
    except BaseException:
        if end is not None:
            end()
        server.close()
        raise


def _serve(addresses: Sequence[str], name: str, make: Callable[[], bytes]) -> Callable[[], None]:
    """Gives the notice at the first port that is free; the result ends that."""
    failures = []
    for port in candidate_ports(name):
        try:
            return NoticeServer(bind_all(addresses, port), make).close
        except ResourceError as error:
            failures.append(str(error))
    raise ResourceError(f"none of the ports at which this step may meet is free: {'; '.join(failures)}")


def _offer(addresses: Sequence[str], note: _Note) -> Callable[[], None]:
    """Makes the note known to processes of this user; the result takes it back."""
    try:
        munge.decode(munge.encode(b"horo"))
    except ResourceError as error:
        return _offer_file(note, str(error))
    return _serve(addresses, note.name, lambda: munge.encode(note.encode()))


def _offer_file(note: _Note, why: str) -> Callable[[], None]:
    file = NoteFile(note.name, Path.home())
    try:
        file.write(note.encode())
    except HoroError as error:
        raise UsageError(
            f"the ranks of this step cannot agree on a secret: MUNGE cannot be used ({why}), nor the home folder "
            f"({error}); put this into the batch script before srun: "
            "export HORO_SECRET=$(python3 -c 'import secrets; print(secrets.token_hex(32))')"
        ) from error
    return file.remove


# ---- the others -----------------------------------------------------------------------------------------------------


class _Search:
    """One rank's search for rank 0."""

    def __init__(self, launch: Launch, step: SlurmStep, config: Config, name: str, given: bytes | None) -> None:
        self._launch, self._step, self._name, self._given = launch, step, name, given
        self._patience_s = config.start_timeout_s
        self._deadline = time.monotonic() + self._patience_s
        self._file = NoteFile(name, Path.home())
        self._reason = ""
        """Why the last thing that was found was of no use."""

    def run(self) -> tuple[StoreClient, bytes]:
        """The connection to rank 0's store, and the secret."""
        endpoints: list[Endpoint] = []
        if self._given is not None or munge.is_installed():
            ports = candidate_ports(self._name)
            endpoints = [Endpoint(address, port) for address in self._addresses() for port in ports]
        found = fetch(endpoints, self._patience_s, self._read, self._look_at_home)
        if found is None:
            raise TimeoutError(self._failure())
        return found

    @property
    def _anywhere(self) -> bool:
        """Whether rank 0 of the job may be on any node, since it is not process 0 of the step."""
        return self._launch.ranks is not None and self._launch.ranks[0] != 0

    def _addresses(self) -> list[str]:
        """Numeric addresses of the node of rank 0, or of all nodes where it may be on any of them."""
        step = self._step
        addresses = [LOOPBACK] if step.node == 0 or self._anywhere else []
        if len(step.hosts) > 1:
            for host in step.hosts if self._anywhere else step.hosts[:1]:
                addresses += _resolve(host, optional=bool(addresses))
        return list(dict.fromkeys(addresses or [LOOPBACK]))

    def _read(self, notice: bytes) -> tuple[StoreClient, bytes] | None:
        if self._given is not None:
            signature, note = notice[:_SIGNATURE_BYTES], notice[_SIGNATURE_BYTES:]
            if not hmac.compare_digest(signature, _sign(self._given, note)):
                self._reason = "who answered does not know this rank's HORO_SECRET"
                return None
            return self._enter(note, self._left_s())
        try:
            note = munge.decode(notice)
        except ResourceError as error:
            self._reason = str(error)
            return None
        return self._enter(note, self._left_s())

    def _look_at_home(self) -> tuple[StoreClient, bytes] | None:
        note = self._file.read() if self._given is None else None
        return None if note is None else self._enter(note, min(_STALE_S, self._left_s()))

    def _enter(self, data: bytes, timeout_s: float) -> tuple[StoreClient, bytes] | None:
        note = _decode(data, self._name)
        if note is None:
            self._reason = "the note of another start was found"
            return None
        first, *others = note.endpoints
        secret = self._given or note.secret
        try:
            return StoreClient(*first, secret, timeout_s, others, hosted_by="rank 0"), secret
        except PeerLostError as error:
            self._reason = str(error)
            return None

    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def _failure(self) -> str:
        where = "any node of the step" if self._anywhere else self._step.hosts[0]
        ports = ", ".join(map(str, candidate_ports(self._name)))
        means = "HORO_SECRET is set here, so it must be on all ranks alike"
        if self._given is None:
            means = (
                f"rank 0 offers the job's secret through MUNGE or in {self._file.path}; where ranks have neither in "
                "common, export HORO_SECRET in the batch script"
            )
        reason = f"; the last reason: {self._reason}" if self._reason else ""
        return (
            f"rank {self._launch.rank} did not find rank 0 of Slurm's step {self._launch.job_id} on {where} (ports "
            f"{ports}) within {self._patience_s:g} s (HORO_START_TIMEOUT): did it start, and does it call init()? "
            f"{means}{reason}"
        )


def _resolve(host: str, optional: bool) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if optional:
            return []
        raise ResourceError(
            f"the node {host!r}, which SLURM_STEP_NODELIST names first, has no address here: {error}; rank 0 is there"
        ) from error
    numeric = [str(entry[4][0]) for entry in found]
    return [address for address in numeric if not is_loopback(address)]  # Debian lets a host call itself 127.0.1.1
