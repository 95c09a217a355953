"""The store of a job that srun has started: rank 0 serves it on the first node of the step.

All ranks derive the same few ports from the name of the start. At one of them rank 0 serves an advertisement: the
addresses of its store. With ``HORO_SECRET`` in the environment, the ports depend on that secret and the advertisement
is signed with it. Else rank 0 draws a secret and puts it into the advertisement, which is then a credential of MUNGE.
If MUNGE is not installed, or none of the ports is free, a file in the user's home has this content instead.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path

from horo.bootstrap.auth import munge
from horo.bootstrap.auth.credential_file import CredentialFile
from horo.bootstrap.auth.handshake import SECRET_BYTES
from horo.bootstrap.launchers.slurm_step import SlurmStep
from horo.bootstrap.launchers.variables import Launch
from horo.bootstrap.net.addresses import CHECK_HOSTS, Endpoint, bind_all
from horo.bootstrap.net.advertisement import AdvertisementServer, Stock, fetch
from horo.bootstrap.net.interfaces import LOOPBACK, is_loopback
from horo.bootstrap.store.client import StoreClient
from horo.bootstrap.store.served import ServedStore, choose_server_addresses
from horo.bootstrap.store.server import StoreServer
from horo.config.table import Config
from horo.errors import HoroError, InternalError, PeerLostError, ResourceError, TimeoutError, UsageError

__all__ = ["candidate_ports", "open_slurm_store"]

_SIGNATURE_BYTES = 32
_PORT_COUNT = 8
_PORTS = range(10_000, 32_000)
"""Below the range from which systems choose ports for outgoing connections."""
_STALE_FILE_TIMEOUT_S = 2.0
"""The time for which to try the addresses in a file; an earlier start may have left it."""


@dataclass(frozen=True)
class _StoreInfo:
    """The addresses of the store, and the secret if only processes of the same user can read the advertisement."""

    name: str
    endpoints: list[Endpoint]
    secret: bytes = field(default=b"", repr=False)

    def encode(self) -> bytes:
        return json.dumps({**asdict(self), "secret": self.secret.hex()}).encode()


def _decode(data: bytes, name: str) -> _StoreInfo | None:
    """The store info of the start ``name``; None if it is damaged or belongs to another start."""
    try:
        values = json.loads(data)
        endpoints = [Endpoint(str(address), int(port)) for address, port in values["endpoints"]]
        info = _StoreInfo(str(values["name"]), endpoints, bytes.fromhex(values["secret"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    usable = info.endpoints and all(0 < endpoint.port < 65536 for endpoint in info.endpoints)
    return info if info.name == name and usable else None


def _sign(secret: bytes, info: bytes) -> bytes:
    return hmac.digest(secret, b"horo slurm note" + info, "sha256")


def candidate_ports(name: str, secret: bytes | None = None, ports: range | None = None) -> list[int]:
    """The ports at which rank 0 may advertise the start ``name``: equal on all ranks, different for each start.

    They are some of ``ports``, if the user has named those.
    With a secret, only its holders can compute the ports, so no other process can occupy all of them beforehand.
    """
    ports = ports or _PORTS
    message = b"horo slurm ports " + name.encode()
    digest = hashlib.sha512(message).digest() if secret is None else hmac.digest(secret, message, "sha512")
    numbers = [int.from_bytes(digest[start : start + 4], "big") for start in range(0, len(digest), 4)]
    return list(dict.fromkeys(ports[number % len(ports)] for number in numbers))[:_PORT_COUNT]


def open_slurm_store(launch: Launch, config: Config, epoch: int) -> tuple[StoreClient, bytes]:
    """Opens the store that rank 0 serves for this one start; on rank 0, starts the server.

    Args:
        launch: a launch by Slurm.
        config: this rank's settings.
        epoch: number of this start.

    Returns:
        A connection to the store, and the secret.

    Raises:
        TimeoutError: rank 0 was not found in time; the message lists the places.
        UsageError: there is no way to agree on a secret; the message has the way to set one.
        ResourceError: rank 0 has no address or free port, or the first node's name has no address.
    """
    if launch.slurm is None:
        raise InternalError(f"rank {launch.rank} is not Slurm's")
    name = f"{launch.job_id}/{epoch}"
    # Each start has another secret, so that no rank joins the store of another step or of an earlier start.
    user_secret = launch.secret and hmac.digest(launch.secret, b"horo slurm " + name.encode(), "sha256")
    if launch.rank == 0:
        return _host(launch, launch.slurm, config, name, user_secret)
    return _StoreSearch(launch, launch.slurm, config, name, user_secret).run()


# ---- rank 0 ---------------------------------------------------------------------------------------------------------


def _host(
    launch: Launch, step: SlurmStep, config: Config, name: str, user_secret: bytes | None
) -> tuple[StoreClient, bytes]:
    secret = user_secret or secrets.token_bytes(SECRET_BYTES)
    told = config.told("network_interfaces")
    addresses = choose_server_addresses(config.network_interfaces, near=True, far=len(step.hosts) > 1, told=told)
    server = StoreServer(
        addresses, secret, on_refused=logging.getLogger("horo").warning, ports=config.ports, clients=launch.size
    )
    withdraw: Callable[[], None] | None = None
    try:
        if user_secret is not None:
            info = _StoreInfo(name, server.endpoints).encode()
            signed = _sign(user_secret, info) + info
            withdraw = _publish_signed(addresses, candidate_ports(name, user_secret, config.ports), name, signed)
        else:
            told_to_all = _StoreInfo(name, server.endpoints, secret)
            withdraw = _publish_secret(addresses, candidate_ports(name, ports=config.ports), told_to_all, launch.size)
        return ServedStore(server, secret, launch.size, config.start_timeout_s, withdraw), secret
    except BaseException:
        if withdraw is not None:
            withdraw()
        server.close()
        raise


def _announce(addresses: Sequence[str], ports: Sequence[int], make: Callable[[], bytes]) -> Callable[[], None]:
    """Serves the advertisement at the first free port; returns a function that stops it."""
    failures = []
    for port in ports:
        try:
            return AdvertisementServer(bind_all(addresses, port), make).close
        except ResourceError as error:
            failures.append(str(error))
    raise ResourceError(f"none of the ports of this step is free: {'; '.join(failures)}")


def _publish_signed(addresses: Sequence[str], ports: Sequence[int], name: str, signed: bytes) -> Callable[[], None]:
    """Publishes signed addresses, which contain no secret; returns a function that withdraws them."""
    try:
        return _announce(addresses, ports, lambda: signed)
    except ResourceError as error:
        file = CredentialFile(name, Path.home())
        try:
            file.write(signed)
        except HoroError as other:
            raise ResourceError(f"{error}; nor can the home folder be used: {other}") from other
        return file.remove


def _publish_secret(addresses: Sequence[str], ports: Sequence[int], info: _StoreInfo, size: int) -> Callable[[], None]:
    """Publishes addresses and secret to the ``size`` processes of this user; returns a function that withdraws them."""
    try:
        munge.decode(munge.encode(b"horo"))
    except ResourceError as error:
        return _publish_file(info, str(error))
    stock = Stock(lambda: munge.encode(info.encode()), 2 * size)
    try:
        return _announce(addresses, ports, stock.take)
    except ResourceError as error:
        return _publish_file(info, str(error))


def _publish_file(info: _StoreInfo, why: str) -> Callable[[], None]:
    file = CredentialFile(info.name, Path.home())
    try:
        file.write(info.encode())
    except HoroError as error:
        raise UsageError(
            f"the ranks of this step cannot agree on a secret: MUNGE cannot be used ({why}), nor the home folder "
            f"({error}); put this into the batch script before srun: "
            f"export HORO_SECRET=$(python3 -c 'import secrets; print(secrets.token_hex({SECRET_BYTES}))')"
        ) from error
    return file.remove


# ---- the other ranks ------------------------------------------------------------------------------------------------


class _StoreSearch:
    """One rank's search for rank 0."""

    def __init__(self, launch: Launch, step: SlurmStep, config: Config, name: str, user_secret: bytes | None) -> None:
        self._launch, self._step, self._name, self._user_secret = launch, step, name, user_secret
        self._timeout_s = config.start_timeout_s
        self._ports = candidate_ports(name, user_secret, config.ports)
        self._deadline = time.monotonic() + self._timeout_s
        self._file = CredentialFile(name, Path.home())
        self._reason = ""
        """The reason why the last advertisement or file could not be used."""

    def run(self) -> tuple[StoreClient, bytes]:
        """The connection to rank 0's store, and the secret."""
        endpoints: list[Endpoint] = []
        if self._user_secret is not None or munge.is_installed():
            endpoints = [Endpoint(address, port) for address in self._addresses() for port in self._ports]
        found = fetch(endpoints, self._timeout_s, self._read_advertisement, self._read_file)
        if found is None:
            raise TimeoutError(self._failure())
        return found

    @property
    def _may_be_on_any_node(self) -> bool:
        """Whether rank 0 of the job may be on any node: it is not process 0 of the step."""
        return self._launch.ranks is not None and self._launch.ranks[0] != 0

    def _addresses(self) -> list[str]:
        """Numeric addresses of the node of rank 0, or of all nodes where it may be on any of them."""
        step = self._step
        addresses = [LOOPBACK] if step.node == 0 or self._may_be_on_any_node else []
        if len(step.hosts) > 1:
            for host in step.hosts if self._may_be_on_any_node else step.hosts[:1]:
                addresses += _resolve(host, optional=bool(addresses))
        return list(dict.fromkeys(addresses or [LOOPBACK]))

    def _read_advertisement(self, advertisement: bytes) -> tuple[StoreClient, bytes] | None:
        if self._user_secret is not None:
            return self._read_signed(advertisement, self._user_secret, self._left_s())
        try:
            info = munge.decode(advertisement)
        except ResourceError as error:
            self._reason = str(error)
            return None
        return self._connect(info, self._left_s())

    def _read_file(self) -> tuple[StoreClient, bytes] | None:
        timeout_s = min(_STALE_FILE_TIMEOUT_S, self._left_s())
        if self._user_secret is None:
            info = self._file.read()
            return None if info is None else self._connect(info, timeout_s)
        try:
            signed = self._file.read()
        except ResourceError as error:
            self._reason = str(error)  # rank 0 may still serve the advertisement at one of the ports
            return None
        return None if signed is None else self._read_signed(signed, self._user_secret, timeout_s)

    def _read_signed(self, signed: bytes, secret: bytes, timeout_s: float) -> tuple[StoreClient, bytes] | None:
        signature, info = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, _sign(secret, info)):
            self._reason = "the process that answered does not know this rank's HORO_SECRET"
            return None
        return self._connect(info, timeout_s)

    def _connect(self, data: bytes, timeout_s: float) -> tuple[StoreClient, bytes] | None:
        info = _decode(data, self._name)
        if info is None:
            self._reason = "the advertisement of another start was found"
            return None
        first, *others = info.endpoints
        secret = self._user_secret or info.secret
        try:
            client = StoreClient(*first, secret, timeout_s, others, served_by="rank 0", answer_s=self._timeout_s)
            return client, secret
        except PeerLostError as error:
            self._reason = str(error)
            return None

    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def _failure(self) -> str:
        where = "any node of the step" if self._may_be_on_any_node else self._step.hosts[0]
        ports = ", ".join(map(str, self._ports))
        hint = "HORO_SECRET is set here, so it must be on all ranks alike"
        if self._user_secret is None:
            hint = (
                f"rank 0 offers the job's secret through MUNGE or in {self._file.path}; where ranks have neither in "
                "common, export HORO_SECRET in the batch script"
            )
        reason = f"; the last reason: {self._reason}" if self._reason else ""
        return (
            f"rank {self._launch.rank} did not find rank 0 of Slurm's step {self._launch.job_id} on {where} (ports "
            f"{ports}) within {self._timeout_s:g} s (HORO_START_TIMEOUT): did it start, and does it call init()? "
            f"{hint}{reason}. {CHECK_HOSTS}"
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
    return [address for address in numeric if not is_loopback(address)]  # on Debian, a host's own name is 127.0.1.1
