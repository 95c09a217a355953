"""The identity of a host, computed without its name."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Identity", "read_identity"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True)
class Identity:
    """Processes with equal identities may share a host; passing a descriptor proves it."""

    boot_id: str
    network: int
    """Inode of the network namespace: abstract sockets and loopback connect only processes in the same one."""
    uid: int
    label: str
    """The user's ``HORO_HOST_ID``, else empty."""

    @property
    def machine(self) -> tuple[str, int]:
        """Equal for two processes that can connect over loopback."""
        return self.boot_id, self.network


def read_identity(label: str | None) -> Identity:
    """This process's identity; a different ``label`` makes a different host."""
    try:
        boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        # The key only makes candidates: in a sandbox without this file, ranks must still pass descriptors.
        boot_id = "host name " + socket.gethostname()
    try:
        network = _NETWORK.stat().st_ino
    except OSError:
        network = 0
    return Identity(boot_id, network, os.getuid(), label or "")
