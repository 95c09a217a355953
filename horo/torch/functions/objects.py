"""Python objects of one rank on all, or of all on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import cloudpickle  # type: ignore[import-untyped]
import torch

from horo.core import context
from horo.errors import MismatchError, UsageError
from horo.torch.engine import runtime as _runtime
from horo.torch.engine import topology
from horo.torch.engine.operation import Operation
from horo.torch.engine.results import Gathered
from horo.torch.engine.submit import check_root, run_broadcast, start_allgather, telling
from horo.torch.engine.tensor_bytes import bytes_of, tensor_of
from horo.torch.functions.object_mac import ObjectKey, make_header
from horo.torch.functions.pickling import pickled
from horo.torch.ops.process_set import ProcessSet, global_process_set, resolve_process_set

__all__ = ["allgather_object", "broadcast_object", "first_operation", "share_object"]


_T = TypeVar("_T")


def broadcast_object(
    obj: _T | None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> _T:
    """Gives every rank the object of ``root_rank``, pickled with cloudpickle.

    Blocks until all ranks have called it.

    Args:
        obj: Any picklable object; ignored on other ranks.
        root_rank: The rank whose values all get, by its number in the job also in a process set; equal on all ranks.
        name: Connects the calls of all ranks; equal on all. None: calls without a name are connected in their order.
        process_set: The ranks that take part; others do not call it.

    Returns:
        ``obj`` itself at the root, a copy elsewhere.

    Raises:
        UsageError: There is no rank ``root_rank``; the name is too long; or the root could not pickle its object
            (there, what pickle raised).
        MismatchError: Ranks have named different roots; or the object was changed on the way, and nothing of it was
            unpickled.
        GroupError: A rank is lost or has shut down.
        NotInitializedError: Before ``init()``.

    Example:
        settings = {"epochs": 3} if hvd.rank() == 0 else None
        settings = hvd.broadcast_object(settings)  # on all ranks {"epochs": 3}
    """
    what = "broadcast_object"
    team = resolve_process_set(process_set, what)
    with telling(first_operation(f"{what}-header", team)._replace(name=name)):
        root_rank = check_root(root_rank, what, team)
    return cast("_T", share_object(lambda: obj, root_rank, what, name, team))


def allgather_object(obj: _T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[_T]:
    """Gives every rank the objects of all ranks, in rank order, pickled with cloudpickle.

    Blocks until all ranks have called it.

    Args:
        obj: Any picklable object; objects of different ranks may be of different types.
        name: Connects the calls of all ranks; equal on all. None: calls without a name are connected in their order.
        process_set: The ranks that take part; others do not call it.

    Returns:
        One object per rank; none of ranks that have joined.

    Raises:
        UsageError: The name is too long; or a rank could not pickle its object (there, what pickle raised).
        MismatchError: What came was changed on the way; nothing of it was unpickled.
        GroupError: A rank is lost or has shut down.
        NotInitializedError: Before ``init()``.

    Example:
        hosts = hvd.allgather_object(os.uname().nodename)
        print(hosts[0], "is the host of rank 0")
    """
    return list(gather_objects(obj, name, process_set).values())


def gather_objects(obj: Any, name: str | None, process_set: ProcessSet) -> dict[int, Any]:
    """The objects of all ranks, by rank; see ``allgather_object``."""
    what = "allgather_object"
    team = resolve_process_set(process_set, what)
    failure, payload = _pickle(lambda: obj)
    with _runtime.current().in_order(what, name, team):
        key = _exchange_headers(what, name, 0, 0, team)
        sealed = key.seal(topology.rank(), _flag(failure) + payload)
        gathered = start_allgather([tensor_of(sealed)], what, name, sync=True, team=team).wait()[0]
    if failure is not None:
        raise failure
    sent = zip(key.ranks, gathered.tensor.split([rows for rows in gathered.rows if rows]), strict=True)
    parts = [key.open(rank, bytes_of(part)) for rank, part in sent]
    for rank, part in zip(key.ranks, parts, strict=True):
        if part[0]:
            raise UsageError(f"{what}: rank {rank} could not pickle its object: {bytes(part[1:]).decode()}")
    return {rank: cloudpickle.loads(part[1:]) for rank, part in zip(key.ranks, parts, strict=True)}


def first_operation(what: str, team: int) -> Operation:
    """The first operation of a call, by which the other ranks learn that this one has refused it."""
    return Operation(what, None, collective="allgather", team=team)


def share_object(produce: Callable[[], Any], root_rank: int, what: str, name: str | None, team: int) -> Any:
    """The root's ``produce()`` on all ranks. An error at the root is one everywhere; no rank is left waiting."""
    is_root = topology.rank() == root_rank
    result = None
    failure: Exception | None = None
    payload = b""
    if is_root:

        def keep() -> Any:
            nonlocal result
            result = produce()
            return result

        failure, payload = _pickle(keep)
    payload = _flag(failure) + payload if is_root else b""
    with _runtime.current().in_order(what, name, team):
        key = _exchange_headers(what, name, len(payload), root_rank, team)
        if root_rank not in key.ranks:
            raise MismatchError(
                f"{what}: its root, rank {root_rank}, has joined and sends nothing; choose another rank"
            )
        if is_root:
            sealed = tensor_of(key.seal(root_rank, payload))
        else:
            sealed = torch.empty(key.sealed_bytes(root_rank), dtype=torch.uint8, device="cpu")
        run_broadcast([sealed], root_rank, what, name, in_place=True, team=team)
    if failure is not None:
        raise failure
    if is_root:
        return result
    received = key.open(root_rank, bytes_of(sealed))
    if received[0]:
        raise UsageError(f"{what}: rank {root_rank} could not send its object: {bytes(received[1:]).decode()}")
    return cloudpickle.loads(received[1:])


def _exchange_headers(what: str, name: str | None, payload_bytes: int, root_rank: int, team: int) -> ObjectKey:
    """The key of a call, made from the headers of all ranks of the team. An automatic name stands for the whole call.

    Raises:
        UsageError: The name is too long.
        MismatchError: Ranks have named different roots.
    """
    runtime = _runtime.current()
    job = runtime.job
    header = make_header(payload_bytes, root_rank)
    kind = f"{what}-header"
    if name is not None:
        runtime.name(what, name)  # refuses what is no name
        size, longest = len(name.encode()), context.NAME_MAX - len(kind) - 1
        if size > longest:
            raise UsageError(f"{what}: the name has {size} bytes; at most {longest} are allowed")
    request = start_allgather([tensor_of(header)], kind, name, sync=True, team=team)
    if name is None:
        runtime.same_number(what, kind, team)
    came: Gathered = request.wait()[0]
    headers = bytes(bytes_of(came.tensor))
    ranks, secret = came.present(runtime.teams.find(team).ranks), job.directory.secret
    key = ObjectKey(secret, what, name, rank=job.rank, ranks=ranks, header=header, headers=headers)
    key.refuse_different_roots()
    return key


def _pickle(produce: Callable[[], Any]) -> tuple[Exception | None, bytes]:
    """The pickled object; or the exception, and its text for the other ranks."""
    try:
        return None, pickled(produce())
    except Exception as error:  # whatever a user's __reduce__ raises
        return error, f"{type(error).__name__}: {error}".encode(errors="replace")


def _flag(failure: Exception | None) -> bytes:
    return b"\0" if failure is None else b"\1"
