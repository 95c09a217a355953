"""Gives each round of a torchrun job keys of its own in torch's store.

torchrun starts all ranks again when a rank fails or a host comes, and keeps one store over these rounds. No variable
tells them apart: each agent counts only the failures that it has seen (TORCHELASTIC_RESTART_COUNT). So rank 0 draws a
name for the round, and each other rank asks it with a nonce. Only a rank 0 of the same round can answer this nonce.

A nonce is a number in the form of a counter of torch's store: to read a counter, and only that, waits for no key.

Nothing here is signed: who can write to the store can keep ranks apart, which ends with an error, and no more. The
secret of the start depends on nonces of its own (``start_secret``).
"""

from __future__ import annotations

import re
import secrets
from dataclasses import replace

from horo.bootstrap.launchers.torch_store import TorchStore
from horo.bootstrap.launchers.variables import Launch
from horo.bootstrap.rendezvous import PROGRESS, Rendezvous
from horo.bootstrap.store.protocol import prefixed
from horo.errors import GroupError

__all__ = ["in_round"]

_TOPIC = "round"
_NAME = re.compile(rb"[0-9a-f]{32}")
_NONCE_MAX = 1 << 62
_NONE = b"0"
"""In the place of a nonce that has been answered; also the value of a counter before anybody sets it."""
_rounds: dict[Launch, Launch] = {}
"""The launches of this process with the name of their round, which all starts of the process share."""


def in_round(launch: Launch, store: TorchStore, timeout_s: float) -> Launch:
    """The launch with a job id that no other round has. On other ranks than 0 it waits for rank 0 at first.

    Raises:
        TimeoutError: rank 0 did not answer; the message names the ranks that have not called ``init()``.
        GroupError: the answer is none of rank 0's.
    """
    if launch not in _rounds:
        prefix = f"horo/{launch.job_id}/rounds/"
        if launch.rank == 0:
            name = secrets.token_hex(16).encode()
            store.meanwhile.append(_Host(store, prefix, launch.size, name).answer)
        else:
            asking = Rendezvous(prefixed(store, prefix), launch.rank, launch.size, launch.host_name, timeout_s)
            nonce = str(1 + secrets.randbelow(_NONCE_MAX))
            asking.publish(_TOPIC, nonce.encode())
            name = asking.receive(nonce, _TOPIC)
            mine, *others = asking.leftovers
            store.set(prefix + mine, _NONE)
            store.delete([prefix + key for key in others])
            if not _NAME.fullmatch(name):
                raise GroupError(f"{name[:40]!r} in torch's store is no answer of rank 0: somebody else writes to it")
        _rounds[launch] = replace(launch, job_id=f"{launch.job_id}/{name.decode()}")
    return _rounds[launch]


class _Host:
    """Rank 0's part: sends the name of the round to each rank that asks, while rank 0 waits in a start."""

    def __init__(self, store: TorchStore, prefix: str, size: int, name: bytes) -> None:
        self._store, self._prefix, self._name = store, prefix, name
        self._keys = [f"{prefix}{_TOPIC}/{rank}" for rank in range(1, size)]
        self._asked = 0
        self._answered: set[int] = set()

    def answer(self) -> bool:
        """Answers the ranks that have asked since the last call, and those of earlier rounds, which are gone.

        Returns:
            Whether one has asked.
        """
        asked = self._store.add(f"{self._prefix}{PROGRESS}", 0)
        if asked == self._asked:
            return False
        self._asked = asked
        for key in self._keys:
            nonce = self._store.add(key, 0)
            if nonce != int(_NONE) and nonce not in self._answered:
                self._answered.add(nonce)
                self._store.set(f"{self._prefix}{nonce}", self._name)
        return True
