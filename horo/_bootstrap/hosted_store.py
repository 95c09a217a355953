"""A store that rank 0 hosts while the job starts, where no launcher does."""

from __future__ import annotations

from collections.abc import Callable

from horo._bootstrap.interfaces import LOOPBACK, interface_addresses, is_loopback, select_addresses
from horo._bootstrap.store import StoreClient, StoreServer
from horo._errors import ResourceError

__all__ = ["HostedStore", "choose_host_addresses"]

_LATE_S = 5.0
"""How long a start that has failed is told to ranks that have not come yet."""


class HostedStore(StoreClient):
    """Rank 0's connection to the store that it hosts; ``close`` ends the hosting once all others have left.

    Args:
        server: from now on this object's.
        secret: the job's.
        size: ranks that are expected.
        patience_s: longest wait for them to leave.
        end: takes away what has led the others here.
    """

    def __init__(
        self,
        server: StoreServer,
        secret: bytes,
        size: int,
        patience_s: float,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._server, self._size, self._patience_s, self._end = server, size, patience_s, end
        near = sorted(server.endpoints, key=lambda endpoint: not is_loopback(endpoint.address))
        super().__init__(*near[0], secret, patience_s, near[1:])

    def close(self) -> None:
        """Leaves the store, waits for the others to leave it too, and ends it; idempotent."""
        super().close()
        self._server.await_departure(self._size, self._patience_s, _LATE_S)
        self._server.close()
        self._end()


def choose_host_addresses(wanted: str | None, near: bool, far: bool) -> list[str]:
    """Where rank 0 listens, so that ranks on this machine (``near``) and on others (``far``) find it.

    Args:
        wanted: the user's choice of interfaces, see ``interfaces.select_addresses``.
        near: loopback is among them.
        far: the addresses of the machine are.

    Raises:
        UsageError: no interface matches ``wanted``. ResourceError: this machine has no address that others could reach.
    """
    chosen: list[str] = []
    if far:
        available = interface_addresses()
        found = [address for addresses in available.values() for address in addresses]
        found = found if wanted is None else select_addresses(wanted, available)
        chosen = [address for address in found if not is_loopback(address)]
        if not chosen:
            raise ResourceError("this machine has no network address that the other hosts could reach")
    return [*dict.fromkeys(chosen), *([LOOPBACK] if near or not far else [])]
