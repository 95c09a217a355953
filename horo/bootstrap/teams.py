"""Adds teams to a running job: makes links if the members are on several hosts, then adds the team to the core."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence

from horo.bootstrap.directory import Directory
from horo.bootstrap.nccl import Nccl
from horo.bootstrap.rendezvous import list_ranks
from horo.bootstrap.team_links import connect_team
from horo.core.context import DTYPES, OPS, Context, RequestBuffer, Tensor, change_name
from horo.errors import MismatchError

__all__ = ["add_team", "exchange_bytes"]


def add_team(
    context: Context,
    directory: Directory,
    number: int,
    ranks: Sequence[int],
    begin: Callable[[], None],
    *,
    nccl: Nccl | None = None,
) -> int:
    """Adds a team. All ranks of the job call it, members and others, in the same order for several teams; blocks.

    Args:
        context, directory: context and directory of the job.
        number: number of this call, from 1, equal on all ranks.
        ranks: the members' ranks in the job, ascending.
        begin: called when all ranks are known to have made this call, so that each can count them.
        nccl: NCCL of this rank, if the job uses it.

    Returns:
        The core's id of the team, for ``RequestBuffer.fill`` and ``Context.remove_team``; the same on all ranks.

    Raises:
        HoroError: as ``connect_team``, ``Nccl.connect_set`` and ``Context.add_team``; if one rank raises, all do.
    """
    name = change_name()  # of the first exchange: where another rank removes a team, both hear of it

    def exchange(mine: bytes) -> list[bytes]:
        nonlocal name
        said = exchange_bytes(context, name, mine)
        if name == change_name():
            begin()
            name = f"add_process_set for the ranks {list_ranks([str(rank) for rank in ranks])}"
        return said

    links = connect_team(directory, number, ranks, exchange, lambda: _check(context))
    try:
        if nccl is not None:
            nccl.connect_set(ranks, exchange)
    except BaseException:
        if links is not None:
            links.close()
        raise
    if links is None or len(links.grouping.hosts) == 1:
        return context.add_team(ranks)
    return context.add_team(ranks, control_fds=links.control_fds, data_fds=links.data_fds)


def _check(context: Context) -> None:
    error = context.health()
    if error is not None:
        raise error


def exchange_bytes(context: Context, name: str, mine: bytes, within_s: float = math.inf) -> list[bytes]:
    """The messages of all ranks, by rank: an allgather of bytes. Blocks as ``Context.wait``, and raises as that."""
    data = array("B", mine)
    tensor = Tensor(data.buffer_info()[0], 0, (len(mine),), DTYPES["uint8"])
    handle = context.submit(RequestBuffer.of(OPS["allgather"], name, [tensor], transient=True))
    try:
        context.wait(handle, within_s)
        gathered, lengths = context.take_result(handle, 0)
        whole = bytes(gathered)
    finally:
        context.release_or_keep(handle, data)  # an exception may have ended the wait
    if 0 in lengths:
        joined = ", ".join(str(rank) for rank, length in enumerate(lengths) if length == 0)
        raise MismatchError(
            f"add_process_set: rank {joined} has joined, and all ranks must call it; call it before or after"
        )
    said = []
    for length in lengths:
        said.append(whole[:length])
        whole = whole[length:]
    return said
