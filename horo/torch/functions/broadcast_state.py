"""Making all ranks start from the same point: parameters, optimizer state and Python objects."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from horo.errors import HoroError, MismatchError
from horo.torch.engine import runtime, topology
from horo.torch.engine.operation import Operation, check_tensor, is_reducible, refuse_lazy
from horo.torch.engine.results import Gathered
from horo.torch.engine.submit import check_root, run_allreduce, start_allgather, start_broadcast, telling
from horo.torch.functions.model_state import model_state
from horo.torch.functions.objects import first_operation, gather_objects, share_object
from horo.torch.ops.allreduce import Average
from horo.torch.ops.process_set import ProcessSet, global_process_set, resolve_process_set

__all__ = [
    "agree",
    "average_buffers",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "describe_groups",
    "describe_shape",
    "overwrite",
    "put_together",
    "take_apart",
]


_CHUNK_BYTES = 64 << 20
"""Tensors that travel as one request: large enough to make requests rare, small enough to overlap them."""


def broadcast_parameters(params: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrites parameters (and buffers) on every rank with those of ``root_rank``.

    Blocks until all ranks have called it.

    Args:
        params: The model; ``model.state_dict()`` (taken in order of the keys), ``model.named_parameters()``, or any
            other iterable of ``(name, tensor)`` pairs or of tensors, on CPU or GPU, of any shapes and of dtypes that
            ``broadcast`` takes. Names, shapes and dtypes are the same on all ranks. Extra states of the model's modules
            (``get_extra_state``) are sent as objects; those in a ``state_dict()`` come into the dict only.
        root_rank: The rank whose values all get, by its number in the job also in a process set; equal on all ranks.
        process_set: The ranks that take part; others do not call it.

    Raises:
        UsageError: ``params`` is something else or has an entry that is no tensor, or there is no rank ``root_rank``.
        UnsupportedError: A tensor is neither on the CPU nor on a CUDA device, or has another layout or dtype.
        MismatchError: Ranks have different parameters; names the first that differs. Nothing was overwritten.
        GroupError: A rank is lost or has shut down.
        NotInitializedError: Before ``init()``.

    Example:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    what = "broadcast_parameters"
    team = resolve_process_set(process_set, what)
    with telling(first_operation(what, team)):
        state = model_state(params)
        root_rank = check_root(root_rank, what, team)
        for name, tensor in state.tensors:
            check_tensor(tensor, what, name)
    lines = [f"{name!r} {describe_shape(tensor)}" for name, tensor in state.tensors]
    agree([*lines, *(f"{name!r} object" for name in state.objects)], what, process_set)
    objects = share_object(lambda: state.objects, root_rank, what, None, team) if state.objects else {}
    overwrite([tensor for _, tensor in state.tensors], root_rank, what, team)
    if topology.rank() != root_rank:
        state.replace(objects)


def average_buffers(model: torch.nn.Module, process_set: ProcessSet = global_process_set) -> None:
    """Makes the buffers of ``model`` equal on all ranks; blocks until all ranks have called it.

    Each rank computes buffers such as the running statistics of BatchNorm from its part of the data. Floating and
    complex ones become the mean over the ranks, others (counts, masks, float8) those of the first rank. Buffers that
    are not in the state of the model stay as they are. Call it before evaluating or saving.

    Args:
        model: Its buffers have the same names, shapes and dtypes on all ranks.
        process_set: The ranks that take part; others do not call it.

    Raises:
        UnsupportedError: A buffer is neither on the CPU nor on a CUDA device, is sparse or is quantized.
        MismatchError: Ranks have different buffers; names the first that differs. Nothing was overwritten.
        GroupError: A rank is lost or has shut down.
        NotInitializedError: Before ``init()``.

    Example:
        hvd.average_buffers(model)
        model.eval()
    """
    what = "average_buffers"
    team = resolve_process_set(process_set, what)
    kept = model.state_dict(keep_vars=True).keys()
    named = [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
    with telling(first_operation(what, team)):
        for name, buffer in named:
            check_tensor(buffer, what, name)
    ranks = agree([f"{name!r} {describe_shape(buffer)}" for name, buffer in named], what, process_set)
    inexact = [b for _, b in named if (b.is_floating_point() or b.is_complex()) and is_reducible(b.dtype)]
    if inexact:
        with torch.no_grad():
            scale = runtime.current().teams.size_for(team) / len(ranks)  # Average divides by all, joined ones too
            run_allreduce(inexact, Operation(what, None, Average, postscale=scale, team=team), in_place=True)
    averaged = set(map(id, inexact))
    overwrite([buffer for _, buffer in named if id(buffer) not in averaged], ranks[0], what, team)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives every rank the optimizer state of ``root_rank``: state tensors and values, and all options such as ``lr``.

    Blocks until all ranks have called it. State that a rank lacks is created, state that the root lacks is dropped; no
    optimizer step is taken. If the root has no state yet, parameters without a gradient get zeros, as in Horovod.

    Args:
        optimizer: Any torch optimizer, wrapped or not, with the same parameter groups on all ranks.
        root_rank: The rank whose values all get, by its number in the job also in a process set; equal on all ranks.
        model: With it, parameters of its sparse embeddings get sparse zeros; nothing else needs it.
        process_set: The ranks that take part; others do not call it.

    Raises:
        UsageError: There is no rank ``root_rank``, or the root's state cannot be sent.
        MismatchError: Ranks have different parameter groups; nothing has changed.
        GroupError: A rank is lost or has shut down.
        NotInitializedError: Before ``init()``.

    Example:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    what = "broadcast_optimizer_state"
    team = resolve_process_set(process_set, what)
    with telling(first_operation(what, team)):
        root_rank = check_root(root_rank, what, team)
        described = describe_groups(optimizer)
    agree(described, what, process_set)
    tensors: list[torch.Tensor] = []
    structure = share_object(lambda: take_apart(optimizer, tensors, what), root_rank, what, None, team)
    if topology.rank() != root_rank:
        put_together(optimizer, structure, tensors)
    overwrite(tensors, root_rank, what, team)
    if not optimizer.state:
        _give_zero_gradients(optimizer, model)


def describe_shape(tensor: torch.Tensor) -> str:
    """Its dtype and shape, in words."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def agree(lines: Sequence[str], what: str, process_set: ProcessSet) -> list[int]:
    """Checks that all ranks describe the next operations alike: one small message, and the whole text only if not.

    Returns:
        Those ranks of the set that take part, as none does that has joined.
    """
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()
    own = torch.tensor([int.from_bytes(digest, "little", signed=True)], device="cpu")
    team = resolve_process_set(process_set, what)
    everyone: Gathered = start_allgather([own], what, None, sync=True, team=team).wait()[0]
    ranks = everyone.present(runtime.current().teams.find(team).ranks)
    if bool((everyone.tensor == own).all()):
        # Either all ranks come to this conclusion or none: equality with everyone is the same fact everywhere.
        return ranks
    texts = gather_objects(list(lines), None, process_set)
    first = texts[ranks[0]]
    for rank, text in texts.items():
        if text != first:
            index = next((i for i, (a, b) in enumerate(zip(first, text, strict=False)) if a != b), None)
            if index is None:
                index = min(len(first), len(text))
            ours, theirs = (t[index] if index < len(t) else "nothing more" for t in (first, text))
            raise MismatchError(f"{what}: entry {index} is {ours} on rank {ranks[0]}, {theirs} on rank {rank}")
    return ranks


def overwrite(tensors: Sequence[torch.Tensor], root_rank: int, what: str, team: int) -> None:
    """Broadcasts into tensors in a few large requests."""
    requests = []
    with torch.no_grad():
        for chunk in _chunks(tensors):
            requests.append(start_broadcast(chunk, root_rank, what, None, in_place=True, team=team))
        failure = None
        for request in requests:
            try:
                request.wait()
            except HoroError as error:
                failure = failure or error
    if failure is not None:
        raise failure


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    chunk: list[torch.Tensor] = []
    room = _CHUNK_BYTES
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if chunk and size > room:
            yield chunk
            chunk, room = [], _CHUNK_BYTES
        chunk.append(tensor)
        room -= size
    if chunk:
        yield chunk


class _Placeholder(NamedTuple):
    """The place of a tensor in a structure that is sent without its tensors."""

    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_beside: bool
    """Whether it is on the device of the parameter whose state it is, at the root."""


class _Structure(NamedTuple):
    options: list[dict[str, Any]]
    """Per parameter group, without ``params``."""
    state: list[Any]
    """Per parameter, in order of the groups; None where the root has no state."""


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _give_zero_gradients(optimizer: torch.optim.Optimizer, model: Any) -> None:
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    sparse = {module.weight for module in modules if getattr(module, "sparse", False)}
    for parameter in _parameters(optimizer):
        if parameter.requires_grad and parameter.grad is None:
            zeros = torch.zeros_like(parameter)
            is_sparse = parameter in sparse or isinstance(optimizer, torch.optim.SparseAdam)
            parameter.grad = zeros.to_sparse(1) if is_sparse else zeros


def describe_groups(optimizer: torch.optim.Optimizer) -> list[str]:
    """A line for each parameter of an optimizer."""
    described = []
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            what = f"group {number} parameter {index}"
            refuse_lazy(parameter, f"broadcast_optimizer_state: {what}")
            described.append(f"{what} {describe_shape(parameter)}")
    return described


def take_apart(optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor], what: str) -> _Structure:
    """The options and the state of an optimizer without their tensors, which ``tensors`` receives, in order.

    Raises:
        UsageError: It is sharded, and its parameters may be of two steps.
    """
    sharded: Any = getattr(optimizer, "_sharded_step", None)
    if sharded is not None:
        sharded.before_state_dict(optimizer)

    def strip(value: Any, like: torch.Tensor | None) -> Any:
        if isinstance(value, torch.Tensor):
            check_tensor(value, f"{what}: the root's state")
            tensors.append(value)
            is_beside = like is not None and value.device == like.device
            return _Placeholder(len(tensors) - 1, tuple(value.shape), value.dtype, is_beside)
        return _map_children(value, lambda item: strip(item, like))

    options = [
        {key: strip(value, None) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    state = [strip(dict(optimizer.state[p]), p) if p in optimizer.state else None for p in _parameters(optimizer)]
    return _Structure(options, state)


def put_together(optimizer: torch.optim.Optimizer, structure: _Structure, tensors: list[torch.Tensor]) -> None:
    """Builds the root's structure here; ``tensors`` receives the tensors that its values belong into, in order."""
    found: dict[int, torch.Tensor] = {}

    def fill(value: Any, present: Any, like: torch.Tensor | None) -> Any:
        if isinstance(value, _Placeholder):
            found[value.position] = _home(value, present, like)
            return found[value.position]
        children = present if isinstance(present, dict) else {}
        if isinstance(value, dict):
            return {key: fill(item, children.get(key), like) for key, item in value.items()}
        return _map_children(value, lambda item: fill(item, None, like))

    for group, options in zip(optimizer.param_groups, structure.options, strict=True):
        for key, value in options.items():
            group[key] = fill(value, group.get(key), None)
    for parameter, state in zip(_parameters(optimizer), structure.state, strict=True):
        if state is None:
            optimizer.state.pop(parameter, None)
        else:
            optimizer.state[parameter] = fill(state, optimizer.state.get(parameter), parameter)
    tensors.extend(found[index] for index in range(len(found)))
    sharded: Any = getattr(optimizer, "_sharded_step", None)
    if sharded is not None:
        sharded.after_load(optimizer)


def _home(placeholder: _Placeholder, present: Any, like: torch.Tensor | None) -> torch.Tensor:
    """Memory for a tensor of the root: the one already here if it fits, else a new one laid out as its parameter."""
    if isinstance(present, torch.Tensor) and (tuple(present.shape), present.dtype) == (
        placeholder.shape,
        placeholder.dtype,
    ):
        return present
    if like is None or not placeholder.is_beside:
        return torch.empty(placeholder.shape, dtype=placeholder.dtype, device="cpu")
    if tuple(like.shape) == placeholder.shape:
        return torch.empty_like(like, dtype=placeholder.dtype, requires_grad=False)
    return like.detach().new_empty(placeholder.shape, dtype=placeholder.dtype)


def _map_children(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(function(item) for item in value)
    return value
