"""Connects the ranks of a job, and later those of each process set, by NCCL, in front of their first operation.

All ranks of the job take part in the exchanges, members or not, and every rank ends with the same result: all members
are connected, or each rank raises an error that names the rank that could not be, and the reason. Nobody connects
before all can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from horo.bootstrap.auth.frames import pack_fields, unpack_fields
from horo.bootstrap.gpu_libraries import CUDA_PLACES, find_cuda, nccl_places
from horo.bootstrap.rendezvous import error_of_peer, kind_and_reason, list_ranks
from horo.core.context import Context
from horo.core.libraries import Gpu, await_nccl, connect_nccl, nccl_id, use_cuda, use_nccl
from horo.errors import HoroError, MismatchError, ResourceError, TimeoutError, UsageError

__all__ = ["Exchange", "Nccl", "check_alike", "choose_device"]

Exchange = Callable[[bytes], Sequence[bytes]]
"""A collective of all ranks of the job: takes this rank's message, returns the messages of all, by rank. May raise."""

_STAGED = "HORO_GPU_OPERATIONS=staged does without NCCL"
_WAITS, _DONE = b"waits", b"done"
_REPORT_MS = 500
"""The time after which a rank that NCCL still connects reports that, and reads whether another one has failed."""


def choose_device(wanted: int | None, local_rank: int, count: int) -> int:
    """The number of the GPU of a rank, whose process sees ``count``: the wanted one, else that of its local rank.

    Raises:
        ResourceError: it sees none.
        UsageError: it does not see that one.
    """
    if count == 0:
        raise ResourceError(f"this process sees no GPU; {_STAGED}")
    number = local_rank if wanted is None and count > 1 else wanted or 0
    if number < count:
        return number
    seen = "GPU, cuda:0" if count == 1 else f"GPUs, cuda:0 to cuda:{count - 1}"
    if wanted is None:
        raise UsageError(f"local rank {local_rank} sees {count} {seen}; choose one by init(device=...)")
    raise UsageError(f"init(device='cuda:{wanted}'): this process sees {count} {seen}")


def check_alike(gpus: Sequence[Gpu], names: Sequence[str]) -> None:
    """Looks whether NCCL can connect all ranks.

    Args:
        gpus: by rank, the GPU and the version of NCCL.
        names: of the ranks.

    Raises:
        MismatchError: the versions differ.
        UsageError: two ranks have one GPU.
    """
    first: dict[bytes, int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu.nccl != gpus[0].nccl:
            raise MismatchError(f"NCCL is {gpus[0].nccl} on {names[0]}, and {gpu.nccl} on {names[rank]}")
        other = first.setdefault(gpu.uuid, rank)
        if other != rank:
            raise UsageError(
                f"{names[other]} and {names[rank]} are on the same GPU, which NCCL refuses: choose another one by "
                f"init(device=...); {_STAGED}"
            )


class Nccl:
    """NCCL on one rank of a job that uses it. All ranks call each of its functions at the same time."""

    def __init__(self, context: Context, rank: int, names: Sequence[str], timeout_s: float) -> None:
        self._context, self._rank, self._names, self._timeout_s = context, rank, names, timeout_s

    def connect_world(
        self,
        wanted: int | None,
        local_rank: int,
        exchange: Exchange,
        *,
        cuda: Sequence[str] | None = None,
        nccl: Sequence[str] | None = None,
    ) -> int:
        """Connects all ranks of the job; blocks until all are connected.

        Args:
            wanted: the number of this rank's GPU, if the program has chosen one.
            local_rank: of this rank.
            exchange: see ``Exchange``.
            cuda, nccl: the places of the libraries; None: where they are looked for.

        Returns:
            The number of its GPU.

        Raises:
            HoroError: as ``choose_device``, ``check_alike`` and ``connect``, on all ranks.
        """
        device = 0

        def open_device() -> bytes:
            nonlocal device
            use_cuda(self._context, cuda or CUDA_PLACES)
            count = find_cuda(cuda, initializes=True).device_count
            device = choose_device(wanted, local_rank, count)
            mine = use_nccl(self._context, nccl_places() if nccl is None else nccl, device)
            where = nccl_id(self._context) if self._rank == 0 else b""
            return pack_fields([mine.nccl.encode(), mine.uuid, where])

        said = [unpack_fields(each) for each in self._share(open_device, exchange)]
        check_alike([Gpu(nccl.decode(), uuid) for nccl, uuid, _ in said], self._names)
        self._connect(range(len(said)), said[0][2], exchange, is_world=True)
        return device

    def connect_set(self, members: Sequence[int], exchange: Exchange) -> None:
        """Connects the members of a process set that is about to be added; blocks until all are connected.

        Raises:
            HoroError: NCCL refuses, or has not connected them in time; on all ranks.
        """
        said = self._share(lambda: nccl_id(self._context) if self._rank == members[0] else b"", exchange)
        self._connect(members, said[members[0]], exchange, is_world=False)

    def _connect(self, members: Sequence[int], where: bytes, exchange: Exchange, *, is_world: bool) -> None:
        until_s = time.monotonic() + self._timeout_s
        is_done = self._rank not in members

        def begin() -> bytes:
            if not is_done:
                connect_nccl(self._context, where, len(members), members.index(self._rank))
            return look()

        def look() -> bytes:
            nonlocal is_done
            is_done = is_done or await_nccl(self._context, _REPORT_MS, is_world=is_world)
            if not is_done and time.monotonic() >= until_s:
                ranks = list_ranks([str(rank) for rank in members])
                raise TimeoutError(
                    f"the ranks {ranks} were not connected in {self._timeout_s:g} s (HORO_START_TIMEOUT)"
                )
            return _DONE if is_done else _WAITS

        said = self._share(begin, exchange)
        while any(word != _DONE for word in said):
            said = self._share(look, exchange)

    def _share(self, step: Callable[[], bytes], exchange: Exchange) -> list[bytes]:
        """Does a step and returns the results of all ranks. Raises on all ranks if it failed on any."""
        failure: HoroError | None = None
        try:
            mine = pack_fields([b"", step()])
        except HoroError as error:
            failure = error
            mine = pack_fields([word.encode() for word in kind_and_reason(error)])
        said = [unpack_fields(each) for each in exchange(mine)]
        failed = [rank for rank, (kind, _) in enumerate(said) if kind]
        if failure is not None:
            raise type(failure)(f"NCCL on {self._names[self._rank]}: {failure}")
        if failed:
            kind, reason = (word.decode("utf-8", "replace") for word in said[failed[0]])
            raise error_of_peer(kind, f"NCCL on {self._names[failed[0]]}: {reason}")
        return [value for _, value in said]
