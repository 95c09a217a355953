"""Collective operations that combine no values: allgather, broadcast, barrier; and ``join``, which leaves them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from horo.torch import _runtime
from horo.torch._handles import first_of, publish
from horo.torch._requests import (
    expect_again,
    list_group,
    repeat,
    repeat_async,
    repeat_gathered,
    run_barrier,
    run_broadcast,
    start_allgather,
    start_broadcast,
)
from horo.torch._staging import Spec
from horo.torch.autograd import allgather_all, broadcast_one, needs_graph
from horo.torch.process_sets import ProcessSet, global_process_set, resolve_process_set

__all__ = [
    "allgather",
    "allgather_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "join",
]


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenates the tensors of all ranks along their first dimension, in rank order; differentiable.

    Blocks until all ranks have called it.

    Args:
        tensor: ``[rows, ...]`` on CPU or GPU, dense, of any dtype that is not quantized: complex, float8 and uint64,
            too. The number of rows may differ by rank; dtype and the other dimensions are equal on all ranks.
        name: Connects the calls of all ranks; equal on all. None: calls without a name are connected in their order.
        process_set: The ranks that take part; others do not call it.

    Returns:
        ``[sum of rows, ...]``, new memory, same dtype. The gradient of this rank's rows is the mean over ranks of what
        they have for them.

    Raises:
        UsageError: ``tensor`` is no tensor or has no dimension.
        UnsupportedError: Another device, layout or dtype.
        MismatchError: Ranks gave other dtypes or dimensions under one name.
        GroupError: A rank is lost or has shut down.
        NotInitializedError: Before ``init()``.

    Example:
        rows = torch.full((hvd.rank() + 1, 2), hvd.rank())
        everyone = hvd.allgather(rows)  # on 2 ranks [3, 2]: one row of 0, two rows of 1
    """
    key = "allgather", name, process_set
    again = repeat_gathered(key, tensor)
    if again is not None:
        return again
    team = resolve_process_set(process_set, "allgather")
    result = allgather_all([tensor], "allgather", name, team)[0]
    if not needs_graph([tensor]):
        expect_again(key, Spec("allgather", name, collective="allgather", team=team), tensor, result)
    return result


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts an ``allgather`` and returns at once, with a handle; not differentiable.

    Args:
        tensor: As for ``allgather``. It must not be changed before ``synchronize``.
        name: As for ``allgather``. A name can be in use once at a time.
        process_set: The ranks that take part; others do not call it.

    Returns:
        A handle for ``poll`` and ``synchronize``; the latter returns ``[sum of rows, ...]``.

    Raises:
        As ``allgather``; ``MismatchError`` and ``GroupError`` come out of ``synchronize``.

    Example:
        handle = hvd.allgather_async(torch.full((1, 2), hvd.rank()))
        everyone = hvd.synchronize(handle)  # on 2 ranks [[0, 0], [1, 1]]
    """
    request = start_allgather([tensor], "allgather", name, team=resolve_process_set(process_set, "allgather"))
    return publish(request, lambda gathered: gathered[0].tensor)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """As ``allgather`` for several tensors, in one operation; differentiable.

    Blocks until all ranks have called it.

    Args:
        tensors: Each as for ``allgather``, of any dtypes; equally many on all ranks.
        name: As for ``allgather``, for the whole group.
        process_set: The ranks that take part; others do not call it.

    Returns:
        For each tensor ``[sum of rows, ...]``.

    Raises:
        As ``allgather``; ``UsageError`` also if ``tensors`` is empty.

    Example:
        x = torch.full((1, 2), hvd.rank())
        rows, labels = hvd.grouped_allgather([x, x[:, 0]])  # on 2 ranks [2, 2] and [2]
    """
    spec = _gathering(name, process_set)
    return allgather_all(list_group(tensors, spec), spec.kind, name, spec.team)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a ``grouped_allgather`` and returns at once, with a handle; not differentiable.

    Args:
        tensors: As for ``grouped_allgather``. They must not be changed before ``synchronize``.
        name: As for ``allgather_async``.
        process_set: The ranks that take part; others do not call it.

    Returns:
        One handle for ``poll`` and ``synchronize``; the latter returns a tuple of tensors.

    Raises:
        As ``grouped_allgather``; ``MismatchError`` and ``GroupError`` come out of ``synchronize``.

    Example:
        handle = hvd.grouped_allgather_async([torch.ones(1), torch.zeros(2)])
        ones, zeros = hvd.synchronize(handle)  # on 2 ranks [2] and [4]
    """
    spec = _gathering(name, process_set)
    request = start_allgather(list_group(tensors, spec), spec.kind, name, team=spec.team)
    return publish(request, lambda gathered: tuple(item.tensor for item in gathered))


def _gathering(name: str | None, process_set: ProcessSet) -> Spec:
    kind = "grouped_allgather"
    return Spec(kind, name, collective="allgather", team=resolve_process_set(process_set, kind))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Gives every rank the tensor of ``root_rank``; differentiable.

    Blocks until all ranks have called it.

    Args:
        tensor: ``[...]`` on CPU or GPU, dense, of any dtype that is not quantized: complex, float8 and uint64, too.
            Same shape and dtype on all ranks.
        root_rank: The rank whose values all get, by its number in the job also in a process set; equal on all ranks.
        name: Connects the calls of all ranks; equal on all. None: calls without a name are connected in their order.
        process_set: The ranks that take part; others do not call it.

    Returns:
        A new contiguous tensor of the same shape and dtype.

    Raises:
        UsageError: ``tensor`` is no tensor, or there is no rank ``root_rank``.
        UnsupportedError: Another device, layout or dtype.
        MismatchError: Ranks gave other shapes, dtypes or roots under one name.
        GroupError: A rank is lost or has shut down.
        NotInitializedError: Before ``init()``.

    Example:
        x = torch.full((2,), hvd.rank())
        y = hvd.broadcast(x, root_rank=0)  # on all ranks [0, 0]
    """
    key = ("broadcast", name, root_rank, process_set) if type(root_rank) is int else None  # True is equal to 1
    again = repeat(key, tensor, in_place=False)
    if again is not None:
        return again
    return broadcast_one(tensor, root_rank, name, key, resolve_process_set(process_set, "broadcast"))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """As ``broadcast``, but writes into ``tensor`` itself; not differentiable.

    Blocks until all ranks have called it.

    Args:
        tensor: As for ``broadcast``; no tensor that autograd has computed.
        root_rank: As for ``broadcast``.
        name: As for ``broadcast``.
        process_set: The ranks that take part; others do not call it.

    Returns:
        ``tensor``.

    Raises:
        As ``broadcast``.

    Example:
        x = torch.full((2,), hvd.rank())
        hvd.broadcast_(x, root_rank=0)  # now x is [0, 0] on all ranks
    """
    key = ("broadcast_", name, root_rank, process_set) if type(root_rank) is int else None  # True is equal to 1
    again = repeat(key, tensor, in_place=True)
    if again is not None:
        return again
    team = resolve_process_set(process_set, "broadcast")
    return run_broadcast([tensor], root_rank, "broadcast", name, in_place=True, key=key, team=team)[0]


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a ``broadcast`` and returns at once, with a handle; not differentiable.

    Args:
        tensor: As for ``broadcast``. It must not be changed before ``synchronize``.
        root_rank: As for ``broadcast``.
        name: As for ``broadcast``. A name can be in use once at a time.
        process_set: The ranks that take part; others do not call it.

    Returns:
        A handle for ``poll`` and ``synchronize``; the latter returns a new tensor.

    Raises:
        As ``broadcast``; ``MismatchError`` and ``GroupError`` come out of ``synchronize``.

    Example:
        handle = hvd.broadcast_async(torch.full((2,), hvd.rank()), root_rank=0)
        y = hvd.synchronize(handle)  # on all ranks [0, 0]
    """
    return _begin_broadcast("broadcast_async", tensor, root_rank, name, process_set, False)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a ``broadcast_`` and returns at once, with a handle.

    Args:
        tensor: As for ``broadcast_``. It must not be read or changed before ``synchronize``.
        root_rank: As for ``broadcast``.
        name: As for ``broadcast_async``.
        process_set: The ranks that take part; others do not call it.

    Returns:
        A handle for ``poll`` and ``synchronize``; the latter returns ``tensor``.

    Raises:
        As ``broadcast``; ``MismatchError`` and ``GroupError`` come out of ``synchronize``.

    Example:
        x = torch.full((2,), hvd.rank())
        hvd.synchronize(hvd.broadcast_async_(x, root_rank=0))  # now x is [0, 0] on all ranks
    """
    return _begin_broadcast("broadcast_async_", tensor, root_rank, name, process_set, True)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Blocks until all ranks have called it.

    Args:
        process_set: The ranks that take part; others do not call it.

    Raises:
        GroupError: A rank is lost or has shut down.
        NotInitializedError: Before ``init()``.

    Example:
        hvd.barrier()
        print(f"rank {hvd.rank()} goes on after all have come")
    """
    run_barrier(resolve_process_set(process_set, "barrier"))


def join(device: int = -1) -> int:
    """Lets the other ranks go on without this one, which has run out of data; blocks until all ranks have joined.

    Until then this rank takes part in the operations of the others, with values that change no result: zeros in sums,
    averages and Adasum, the neutral element in ``Min``, ``Max`` and ``Product``, no rows in ``allgather``. ``Average``
    divides by the number of all ranks, joined ones included, as Horovod does. (1 + 0i, the neutral element of complex
    products, makes NaN of the part beside an infinite or NaN one, as any multiplication by it.) This holds for all
    process sets that this rank is a member of. Operations that this rank has begun before go on; it can begin no
    others.

    The model and the optimizer of a rank that joins early have missed the steps of the others: give all ranks those of
    the rank that joined last before they go on training.

    Operations that no rank can do for another raise ``MismatchError`` on the ranks that call them, which can go on:
    ``reducescatter``, ``alltoall``, ``add_process_set``, ``remove_process_set``, ``broadcast`` from a rank that has
    joined, and ``Min``, ``Max`` or ``Product`` with a ``prescale_factor``.

    An exception of a signal handler, such as Ctrl-C, ends the wait. The rank has joined all the same: another call goes
    on to wait, and other operations are refused until all ranks have joined.

    This wait never ends the job as a stall does, however long the others need; it is reported if nothing moves.

    Args:
        device: Accepted because Horovod takes it, for the GPU that its zeros are made on; nothing needs it here.

    Returns:
        The rank that joined last; the same on all ranks.

    Raises:
        UnsupportedError: The job has ``HORO_GPU_OPERATIONS=nccl``.
        UsageError: A thread of this rank adds or removes a process set.
        GroupError: A rank is lost or has shut down.
        NotInitializedError: Before ``init()``.

    Example:
        model = torch.nn.Linear(1, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for _ in range(2 + hvd.rank()):  # ranks have different numbers of batches
            optimizer.zero_grad()
            model(torch.ones(1)).sum().backward()
            optimizer.step()
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    """
    del device
    return _runtime.current().joining.run()


def _begin_broadcast(  # noqa: PLR0917  (keywords would cost time)
    function: str, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet, in_place: bool
) -> int:
    key = (function, name, root_rank, process_set) if type(root_rank) is int else None  # True is equal to 1
    handle = repeat_async(key, tensor, in_place=in_place)
    if handle is not None:
        return handle
    team = resolve_process_set(process_set, "broadcast")
    request = start_broadcast([tensor], root_rank, "broadcast", name, in_place=in_place, key=key, team=team)
    return publish(request, first_of)
