"""Credentials of MUNGE, the authentication service of most Slurm sites.

Only a process of the same user can decode a credential, on any host of the cluster. The decoder learns which user made
it. So neither a client nor a server of another user obtains the secret.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence

from horo.errors import ResourceError

__all__ = ["decode", "encode", "is_installed"]

_PROGRAM_S = 10.0
_UID = re.compile(rb"^UID:\s+(?:\S+ \()?(\d+)\)?\s*$", re.MULTILINE)


def is_installed() -> bool:
    """Whether both programs are in PATH."""
    return shutil.which("munge") is not None and shutil.which("unmunge") is not None


def encode(payload: bytes) -> bytes:
    """A credential that only processes of this user can decode; each can be decoded once on a host.

    Raises:
        ResourceError: munge is not installed or its daemon does not work; the message gives the reason.
    """
    return _run(["munge", f"--restrict-uid={os.getuid()}"], payload)


def decode(credential: bytes) -> bytes:
    """The payload that a process of this user has put into a credential.

    Raises:
        ResourceError: it is no credential, is old, is used, is not for this user or not from this user.
    """
    said = _run(["unmunge", "--numeric"], credential)
    head, _, payload = said.partition(b"\n\n")
    encoder = _UID.search(head)
    if encoder is None or int(encoder[1]) != os.getuid():
        raise ResourceError("the credential was made by another user")
    return payload


def _run(command: Sequence[str], payload: bytes) -> bytes:
    try:
        done = subprocess.run(command, input=payload, capture_output=True, timeout=_PROGRAM_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ResourceError(f"{command[0]}: {error}") from error
    if done.returncode:
        reason = done.stderr.decode("utf-8", "replace").strip() or f"it ended with {done.returncode}"
        raise ResourceError(f"{command[0]}: {reason}")
    return done.stdout
