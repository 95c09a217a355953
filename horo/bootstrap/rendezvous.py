"""The rendezvous of one job's ranks in the store: publish and gather values, report missing and failed ranks."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Sequence

from horo.bootstrap.store.protocol import Store, StoreAbandonedError, StoreTimeoutError
from horo.errors import AbortedError, HoroError, MismatchError, PeerLostError, TimeoutError, UsageError

__all__ = ["PROGRESS", "Rendezvous", "error_of_peer", "kind_and_reason", "list_ranks", "rank_is_missing"]

_WARNING_INTERVAL_S = 10.0
_FAILED = "failed"
_READY = "ready"
_ENTERED = "entered"
PROGRESS = "progress count"
"""Key of the number of values that ranks have published in a rendezvous."""
_SHOWN_MAX = 8
_ERRORS_OF_ALL_RANKS: dict[str, type[HoroError]] = {error.__name__: error for error in (MismatchError, PeerLostError)}


def rank_is_missing(job_id: str, generation: int, reason: str) -> tuple[str, bytes]:
    """The key and the value that end one start of a job on all ranks, since one rank cannot join."""
    return f"horo/{job_id}/{generation}/{_FAILED}", f"{PeerLostError.__name__}\n{reason}".encode("utf-8", "replace")


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
        self.leftovers += [key, PROGRESS] if self.rank == 0 else [key]
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
        self._store.add(PROGRESS, 1)

    def share(
        self,
        topic: str,
        value: bytes,
        combine: Callable[[list[bytes]], bytes],
        check: Callable[[bytes], None] | None = None,
    ) -> bytes:
        """Sends this rank's value to rank 0, and returns what rank 0 makes of the values of all ranks.

        All ranks get that one result: if each read the values of all, replies would grow with the square of the size.

        Args:
            topic: names the values.
            value: of this rank.
            combine: makes the result from the values of all ranks, in their order; called on rank 0 only.
            check: called on the other ranks with the value of rank 0, as soon as that is there; may raise.

        Raises:
            As ``gather``.
        """
        self.publish(topic, value)
        if self.rank == 0:
            result = combine(self.gather(topic))
            self.publish(f"all {topic}", result)
            return result
        if check is not None:
            check(*self.gather(topic, [0]))
        return self._await_root(f"all {topic}/0", topic)

    def gather(self, topic: str, ranks: Sequence[int] | None = None) -> list[bytes]:
        """Waits for the values of ``ranks`` (all by default) and returns them in the same order.

        Raises:
            TimeoutError: no rank published anything for ``timeout_s``; the message names the missing ranks.
            AbortedError, MismatchError, PeerLostError: another rank failed or died; the message gives rank and reason.
        """
        keys = {f"{topic}/{rank}": rank for rank in (range(self.size) if ranks is None else ranks)}
        what = f"all {topic}" if ranks is None else next(iter(keys), topic)
        return self._await(list(keys), what, lambda missing: [keys[key] for key in missing])

    def send(self, key: str, value: bytes) -> None:
        """On rank 0: sends a value to the one rank that calls ``receive`` for this key."""
        self._store.set(key, value)

    def receive(self, key: str, topic: str) -> bytes:
        """Waits for a value that rank 0 sends once it has the ``topic`` of all ranks; raises as ``gather``."""
        self.leftovers.append(key)
        return self._await_root(key, topic)

    def _await_root(self, key: str, topic: str) -> bytes:
        (value,) = self._await([key], f"all {topic}", lambda _: self._find_missing(topic, range(self.size)) or [0])
        return value

    def _await(self, keys: Sequence[str], what: str, late: Callable[[Sequence[str]], Sequence[int]]) -> list[bytes]:
        """Waits for values.

        ``what`` is the same on all ranks that wait for the same ones, ``late`` returns those that are behind, given the
        keys that are missing.
        """
        began = time.monotonic()
        deadline = began + self.timeout_s
        progress, waits, warnings = 0, 0, 0
        while True:
            slice_s = max(min(_WARNING_INTERVAL_S, deadline - time.monotonic()), 0.0)
            try:
                return self._store.get_many(keys, slice_s, unless=_FAILED)
            except StoreAbandonedError as error:
                raise self._aborted(error) from None
            except StoreTimeoutError as error:
                missing = error.missing
            now, latest = time.monotonic(), self._store.add(PROGRESS, 0)
            # A store without MACs can be made to count for ever: so progress counts once per rank at most.
            if latest > progress and waits <= self.size:
                progress, waits, deadline = latest, waits + 1, max(deadline, now + self.timeout_s)
            if now >= deadline:
                raise TimeoutError(
                    f"{self._describe_late(late(missing))} within {self.timeout_s:g} s of any progress "
                    "(HORO_START_TIMEOUT): was it started, and is it running?"
                )
            warnings += 1
            if self._speaks_for_host(what, warnings):
                told = self._describe_late(late(missing))
                self._log.warning("%s has waited %.0f s in init(): %s", self.name(self.rank), now - began, told)

    def _speaks_for_host(self, what: str, number: int) -> bool:
        """Whether this rank is the first of its host with its warning of this number about ``what``."""
        host = hashlib.sha256(self.host_names[self.rank].encode("utf-8", "replace")).hexdigest()[:16]
        counter = f"warning count/{host}/{number}/{what}"
        self.leftovers.append(counter)
        return self._store.add(counter, 1) == 1

    def _find_missing(self, topic: str, ranks: Sequence[int]) -> list[int]:
        """The ranks among ``ranks`` that have not published ``topic`` yet."""
        keys = {f"{topic}/{rank}": rank for rank in ranks}
        try:
            self._store.get_many(list(keys), 0.0, unless=_FAILED)
        except StoreAbandonedError as error:
            raise self._aborted(error) from None
        except StoreTimeoutError as error:
            return [keys[key] for key in error.missing]
        return []

    def _describe_late(self, missing: Sequence[int]) -> str:
        """The step that missing ranks have not done, in the terms of a training script."""
        absent = self._find_missing(_ENTERED, missing)
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
        self.share(_READY, b"", lambda _: b"")
        # Another rank may still be waiting for the word of rank 0: what it reads is deleted with the leftovers.
        kept = [f"{_READY}/{self.rank}", f"all {_READY}/{self.rank}", PROGRESS]
        self._store.delete([key for key in self.leftovers if key not in kept])
        self.leftovers = [key for key in self.leftovers if key in kept]

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
