"""A store that rank 0 serves while the job starts, if no launcher serves one."""

from __future__ import annotations

from collections.abc import Callable

from horo.bootstrap.net.interfaces import LOOPBACK, interface_addresses, is_loopback, select_addresses
from horo.bootstrap.store.client import StoreClient
from horo.bootstrap.store.server import StoreServer
from horo.errors import ResourceError

__all__ = ["ServedStore", "choose_server_addresses"]

_CONNECT_TIMEOUT_S = 5.0
"""The time for which a failed start stays visible to ranks that have not connected yet."""


class ServedStore(StoreClient):
    """Rank 0's connection to the store that it serves; ``close`` ends the store after all others have disconnected.

    Args:
        server: the server, which this object closes.
        secret: the job's secret.
        size: ranks of the job.
        timeout_s: longest wait for them to disconnect.
        withdraw: removes the store's address from the place where rank 0 has published it.
    """

    def __init__(
        self,
        server: StoreServer,
        secret: bytes,
        size: int,
        timeout_s: float,
        withdraw: Callable[[], None] = lambda: None,
    ) -> None:
        self._server, self._size, self._timeout_s, self._withdraw = server, size, timeout_s, withdraw
        near = sorted(server.endpoints, key=lambda endpoint: not is_loopback(endpoint.address))
        super().__init__(*near[0], secret, timeout_s, near[1:])

    def check_room(self) -> None:
        """Raises ResourceError if this process may not open enough files for the connections of all ranks."""
        if self._server.shortage:
            raise ResourceError(
                f"this process serves the store of a job of {self._size} ranks, for which it needs "
                f"{self._server.shortage}"
            )

    def close(self) -> None:
        """Disconnects, waits until the other ranks have disconnected too, and ends the store; idempotent."""
        super().close()
        self._server.wait_for_disconnects(self._size, self._timeout_s, _CONNECT_TIMEOUT_S)
        self._server.close()
        self._withdraw()


def choose_server_addresses(wanted: str | None, near: bool, far: bool, told: str = "") -> list[str]:
    """Addresses on which rank 0 listens for ranks on this machine (``near``) and on other machines (``far``).

    Args:
        wanted: the user's choice of interfaces, see ``interfaces.select_addresses``.
        near: include loopback.
        far: include the addresses of the machine.
        told: as for ``interfaces.select_addresses``.

    Raises:
        UsageError: no interface matches ``wanted``. ResourceError: this machine has no address that others could reach.
    """
    chosen: list[str] = []
    if far:
        available = interface_addresses()
        found = [address for addresses in available.values() for address in addresses]
        found = found if wanted is None else select_addresses(wanted, available, told)
        chosen = [address for address in found if not is_loopback(address)]
        if not chosen:
            raise ResourceError("this machine has no network address that the other hosts could reach")
    return [*dict.fromkeys(chosen), *([LOOPBACK] if near or not far else [])]
