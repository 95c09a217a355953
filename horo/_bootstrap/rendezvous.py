"""The rendezvous of one job's ranks in the store: publish and gather values, report missing and failed ranks."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence

from horo._bootstrap.store.protocol import Store, StoreAbandonedError, StoreTimeoutError
from horo.errors import AbortedError, HoroError, MismatchError, PeerLostError, TimeoutError, UsageError

__all__ = ["Rendezvous", "error_of_peer", "kind_and_reason", "list_ranks", "rank_is_missing"]

_WARNING_INTERVAL_S = 10.0
_FAILED = "failed"
_READY = "ready"
_ENTERED = "entered"
_SHOWN_MAX = 8
_ERRORS_OF_ALL_RANKS: dict[str, type[HoroError]] = {error.__name__: error for error in (MismatchError, PeerLostError)}


def rank_is_missing(job_id: str, reason: str) -> tuple[str, bytes]:
    """The key and the value that end the first start of a job on all ranks, since one rank cannot join."""
    return f"horo/{job_id}/1/{_FAILED}", f"{PeerLostError.__name__}\n{reason}".encode("utf-8", "replace")


class Rendezvous:
    """One start of one job, from the view of one rank.

    Args:
        store: a view of the store with a namespace for this start.
        rank: rank of this process.
        size: size of the job.
        host_name: name of this host, for messages.
        timeout_s: longest wait without any progress.
    """

    def __init__(self, store: Store, rank: int, size: int, host_name: str, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.host_names: dict[int, str] = {rank: host_name}
        self._store = store
        self.leftovers: list[str] = []
        """This rank's keys that are still in the store. They can be deleted when all ranks are in the next start."""
        self._log = logging.getLogger("horo")

    def enter(self) -> None:
        """Registers this rank. From here on the other ranks get an error if this process dies.

        Raises:
            UsageError: another process has this rank as well.
        """
        key = f"{_ENTERED} count/{self.rank}"  # a counter is no value that others could read, see store.signed
        self.leftovers.append(key)
        if self._store.add(key, 1) > 1:
            raise UsageError(f"{self.name(self.rank)} was started twice: two processes of this job have this rank")
        died = f"{PeerLostError.__name__}\n{self.name(self.rank)} died while init() was running"
        self._store.set_on_disconnect(_FAILED, died.encode())
        self.publish(_ENTERED, b"")

    def publish(self, topic: str, value: bytes) -> None:
        """Sends this rank's value to all ranks."""
        key = f"{topic}/{self.rank}"
        self.leftovers.append(key)
        self._store.set(key, value)

    def gather(self, topic: str, ranks: Sequence[int] | None = None) -> list[bytes]:
        """Waits for the values of ``ranks`` (all by default) and returns them in the same order.

        Raises:
            TimeoutError: no further value came for ``timeout_s``; the message names the missing ranks.
            AbortedError, MismatchError, PeerLostError: another rank failed or died; the message gives rank and reason.
        """
        wanted = range(self.size) if ranks is None else ranks
        keys = {f"{topic}/{rank}": rank for rank in wanted}
        began = time.monotonic()
        deadline = began + self.timeout_s
        missing_before = len(keys) + 1
        while True:
            slice_s = max(min(_WARNING_INTERVAL_S, deadline - time.monotonic()), 0.0)
            try:
                return self._store.get_many(list(keys), slice_s, unless=_FAILED)
            except StoreAbandonedError as error:
                raise self._aborted(error) from None
            except StoreTimeoutError as error:
                missing = [keys[key] for key in error.missing]
            now = time.monotonic()
            if len(missing) < missing_before:
                missing_before, deadline = len(missing), max(deadline, now + self.timeout_s)
            late = self._describe_late(missing)
            if now >= deadline:
                raise TimeoutError(
                    f"{late} within {self.timeout_s:g} s of any progress (HORO_START_TIMEOUT): was it started, and is "
                    "it running?"
                )
            self._log.warning("%s has waited %.0f s in init(): %s", self.name(self.rank), now - began, late)

    def _describe_late(self, missing: Sequence[int]) -> str:
        """The step that missing ranks have not done, in the terms of a training script."""
        entered = {f"{_ENTERED}/{rank}": rank for rank in missing}
        absent: list[int] = []
        try:
            self._store.get_many(list(entered), 0.0, unless=_FAILED)
        except StoreAbandonedError as error:
            raise self._aborted(error) from None
        except StoreTimeoutError as error:
            absent = [entered[key] for key in error.missing]
        begun = [rank for rank in missing if rank not in absent]
        sorts = ((absent, "not called horo.torch.init()"), (begun, "begun init() but not come through it"))
        return "; ".join(
            f"{self.names(ranks)} {'has' if len(ranks) == 1 else 'have'} {what}" for ranks, what in sorts if ranks
        )

    def check(self) -> None:
        """Raises AbortedError if another rank has failed meanwhile."""
        try:
            self._store.get_many([], 0.0, unless=_FAILED)
        except StoreAbandonedError as error:
            raise self._aborted(error) from None

    def fail(self, error: BaseException) -> None:
        """Publishes that this rank has failed, so that the others stop waiting. Only the first failure counts."""
        if isinstance(error, AbortedError):
            return
        kind, reason = kind_and_reason(error)
        with contextlib.suppress(HoroError):
            if self._store.add(f"{_FAILED} count", 1) == 1:
                self._store.set(_FAILED, f"{kind}\n{self.name(self.rank)}: {reason}".encode())

    def finish(self) -> None:
        """Waits until all ranks have called ``finish``, then deletes the keys that this rank has published."""
        self.publish(_READY, b"")
        self.gather(_READY)
        # Another rank may still be waiting for this rank's "ready": that key is deleted with the leftovers.
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
        kind, _, reason = error.value.decode("utf-8", "replace").partition("\n")
        return error_of_peer(kind, f"init() was given up because another rank failed: {reason}")


def kind_and_reason(error: BaseException) -> tuple[str, str]:
    """An error in the form that is sent to other ranks: the name of its class, and its message."""
    kind = type(error).__name__
    return kind, str(error) if isinstance(error, HoroError) else f"{kind}: {error}"


def error_of_peer(kind: str, message: str) -> HoroError:
    """The exception to raise here for an error of another rank; ``kind`` is the name of its class."""
    # A mismatch or a lost peer concerns all ranks: each of them raises that class.
    return _ERRORS_OF_ALL_RANKS.get(kind, AbortedError)(message)


def list_ranks(names: Sequence[str]) -> str:
    """Joins at most eight names and the number of the rest."""
    more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
    return ", ".join(names[:_SHOWN_MAX]) + more
