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
    """Inode of the network namespace: abstract sockets and loopback end at its border."""
    uid: int
    label: str
    """The user's ``HORO_HOST_ID``, else empty."""

    @property
    def machine(self) -> tuple[str, int]:
        """Equal where loopback leads from one process to the other."""
        return self.boot_id, self.network


def read_identity(label: str | None) -> Identity:
    """This process's identity; a different ``label`` makes a different host."""
    try:
        boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        # Only a candidate's key: a sandbox without this file still has to pass descriptors to share memory.
        boot_id = "host name " + socket.gethostname()
    try:
        network = _NETWORK.stat().st_ino
    except OSError:
        network = 0
    return Identity(boot_id, network, os.getuid(), label or "")
