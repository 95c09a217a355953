"""Ranks of one job finding each other in the store: publish, gather, and say who is missing or has failed."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence

from horo._bootstrap.store_seam import Store, StoreAbandonedError, StoreTimeoutError
from horo._errors import AbortedError, HoroError, MismatchError, PeerLostError, TimeoutError, UsageError

__all__ = ["Meeting", "failure_elsewhere", "kind_and_reason", "list_ranks"]

_REMIND_S = 10.0
_FAILED = "failed"
_READY = "ready"
_SHOWN_MAX = 8
_SHARED_FATE: dict[str, type[HoroError]] = {error.__name__: error for error in (MismatchError, PeerLostError)}


class Meeting:
    """One start of one job, seen by one rank.

    Args:
        store: seen through a namespace of its own for this start.
        rank: of this process.
        size: of the job.
        host_name: for messages.
        patience_s: longest wait without any progress.
    """

    def __init__(self, store: Store, rank: int, size: int, host_name: str, patience_s: float) -> None:
        self.rank = rank
        self.size = size
        self.patience_s = patience_s
        self.host_names: dict[int, str] = {rank: host_name}
        self._store = store
        self.leftovers: list[str] = []
        """This rank's keys that are still in the store; to be deleted when all ranks have come to the next start."""
        self._log = logging.getLogger("horo")

    def enter(self) -> None:
        """Comes to the meeting; from here on the others hear of it should this process die.

        Raises:
            UsageError: another process has this rank as well.
        """
        key = f"claim/{self.rank}"
        self.leftovers.append(key)
        if self._store.add(key, 1) > 1:
            raise UsageError(f"{self.name(self.rank)} was started twice: two processes of this job have this rank")
        died = f"{PeerLostError.__name__}\n{self.name(self.rank)} died while init() was running"
        self._store.leave_will(_FAILED, died.encode())

    def publish(self, topic: str, value: bytes) -> None:
        """Tells all ranks this rank's value."""
        key = f"{topic}/{self.rank}"
        self.leftovers.append(key)
        self._store.set(key, value)

    def gather(self, topic: str, ranks: Sequence[int] | None = None) -> list[bytes]:
        """The values of ``ranks`` (all by default), in their order, once all are there.

        Raises:
            TimeoutError: nobody new came for ``patience_s``; names the missing ranks.
            AbortedError, MismatchError, PeerLostError: another rank failed or died; says which and why.
        """
        wanted = range(self.size) if ranks is None else ranks
        keys = {f"{topic}/{rank}": rank for rank in wanted}
        began = time.monotonic()
        deadline = began + self.patience_s
        missing_before = len(keys) + 1
        while True:
            slice_s = max(min(_REMIND_S, deadline - time.monotonic()), 0.0)
            try:
                return self._store.get_many(list(keys), slice_s, unless=_FAILED)
            except StoreAbandonedError as error:
                raise self._aborted(error) from None
            except StoreTimeoutError as error:
                missing = [keys[key] for key in error.missing]
            now = time.monotonic()
            if len(missing) < missing_before:
                missing_before, deadline = len(missing), max(deadline, now + self.patience_s)
            if now >= deadline:
                raise TimeoutError(
                    f"{self.names(missing)} did not arrive at '{topic}' within {self.patience_s:g} s of any progress "
                    "(HORO_START_TIMEOUT): did it start, and does it call init()?"
                )
            self._log.warning(
                "%s has waited %.0f s at '%s' for %s", self.name(self.rank), now - began, topic, self.names(missing)
            )

    def check(self) -> None:
        """Raises AbortedError if another rank has failed meanwhile."""
        try:
            self._store.get_many([], 0.0, unless=_FAILED)
        except StoreAbandonedError as error:
            raise self._aborted(error) from None

    def fail(self, error: BaseException) -> None:
        """Tells the others that this rank gives up, so that they need not wait for it; the first to fail is heard."""
        if isinstance(error, AbortedError):
            return
        kind, reason = kind_and_reason(error)
        with contextlib.suppress(HoroError):
            if self._store.add(f"{_FAILED} count", 1) == 1:
                self._store.set(_FAILED, f"{kind}\n{self.name(self.rank)}: {reason}".encode())

    def finish(self) -> None:
        """Waits until all ranks have come this far, then takes back what this rank has published."""
        self.publish(_READY, b"")
        self.gather(_READY)
        # The last to look still needs this rank's "ready"; it goes with the leftovers.
        self._store.delete([key for key in self.leftovers if not key.startswith(_READY)])
        self.leftovers = [f"{_READY}/{self.rank}"]

    def name(self, rank: int) -> str:
        """``rank 3 (h2)``, or ``rank 3`` while its host is unknown."""
        host = self.host_names.get(rank)
        return f"rank {rank} ({host})" if host else f"rank {rank}"

    def names(self, ranks: Sequence[int]) -> str:
        """A few ranks by name and the number of the rest."""
        return list_ranks([self.name(rank) for rank in ranks])

    def _aborted(self, error: StoreAbandonedError) -> HoroError:
        kind, _, told = error.value.decode("utf-8", "replace").partition("\n")
        return failure_elsewhere(kind, f"init() was given up because another rank failed: {told}")


def kind_and_reason(error: BaseException) -> tuple[str, str]:
    """What other ranks are told of an error here: the name of its class, and its sentence."""
    kind = type(error).__name__
    return kind, str(error) if isinstance(error, HoroError) else f"{kind}: {error}"


def failure_elsewhere(kind: str, sentence: str) -> HoroError:
    """The error here for one of another rank, whose class had the name ``kind``."""
    # What ranks disagree about is everybody's error, whoever sees it first; so is a death.
    return _SHARED_FATE.get(kind, AbortedError)(sentence)


def list_ranks(names: Sequence[str]) -> str:
    """Joins names; beyond eight only their number."""
    more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
    return ", ".join(names[:_SHOWN_MAX]) + more
