"""The process group of the backend "horo": each method of torch.distributed as one request to the core.

torch calls a method by its name, from Python and from C++ (DDP, functional collectives, DTensor). Names differ between
versions of torch; all are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_distributed

from horo.errors import UsageError
from horo.torch.distributed.connection import open_job
from horo.torch.distributed.exchange import Exchange, GroupCall, writable
from horo.torch.distributed.other_devices import OtherDevices, by_device, is_for_horo
from horo.torch.distributed.reduction import Reduction, key_of, reduction_of
from horo.torch.distributed.sparse import check_sum, entries_of, put_together
from horo.torch.engine.operation import check_tensor, has_all_memory

__all__ = ["HoroProcessGroup"]

_CPU = torch.device("cpu")

_Base: Any = torch_distributed.ProcessGroup


class HoroProcessGroup(_Base):  # type: ignore[misc]
    """A group of ranks that ``init_process_group("horo")`` or ``new_group`` has made.

    Ranks call its methods in the same order. A difference ends the calls of all ranks with ``MismatchError``, a lost
    rank with ``PeerLostError``: errors of horo are RuntimeErrors.
    """

    def __init__(self, options: Any) -> None:
        """``options``: torch's; blocks until all members have come. HoroError: as ``horo.torch.init``."""
        super().__init__(options.group_rank, options.group_size)
        self._rank, self._size = options.group_rank, options.group_size
        self._store = options.store
        self.other_devices = OtherDevices(self._store, self._rank, self._size, options.timeout)
        self._name, self._description = str(options.group_id), "undefined"
        self._exchange = Exchange(open_job(options), f"process group {self._name}", options.timeout)

    # -- what torch asks about it --------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "horo"

    def getRank(self) -> int:
        return int(self._rank)

    def getSize(self) -> int:
        return int(self._size)

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    rank, size, name = getRank, getSize, getBackendName
    _get_backend_name, _set_group_name, _set_group_desc = getBackendName, setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    supports_splitting = supports_coalescing = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU, torch.device("cuda")] if self.other_devices.are_there() else [_CPU]

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cpu" else self.other_devices.backend(device)

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        """Operations are counted by the core."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def get_group_store(self) -> Any:
        """The store that torch has given the group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of collectives that are begun from now on; where one passes, the group ends on all ranks."""
        self._exchange.set_timeout(timeout)

    _set_default_timeout = set_timeout

    # -- its end -------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leaves the group; what all ranks have begun is finished first. Idempotent."""
        self._exchange.close("it has been destroyed")
        self.other_devices.shutdown()

    def abort(self) -> None:
        """Ends the group at once: operations in progress fail, on all ranks. Idempotent; any thread."""
        self._exchange.abort("it has been aborted", f"abort() of process group {self._name}")
        self.other_devices.abort()

    # -- reductions ----------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Reduces each tensor in place."""
        opts = opts or torch_distributed.AllreduceOptions()
        tensor = tensors[0]
        key = ("allreduce", getattr(opts, "asyncOp", True), key_of(opts.reduceOp), tensor.dtype, tensor.numel())
        if len(tensors) == 1 and (work := self._exchange.again(key, opts, tensor)) is not None:
            return work
        if not is_for_horo(tensor):
            return self.other_devices.group(tensor.device).allreduce(tensors, opts)
        reduction = reduction_of(opts.reduceOp, "all_reduce")
        if tensor.is_sparse:
            averages = check_sum(reduction)
            (tensor,) = tensors
            finish = put_together(tensor, self._size, averages=averages)
            return self._exchange.gather_rows(entries_of(tensor), finish, [tensor], opts)
        return self._in_place("allreduce", "all_reduce", tensors, opts, key, reduction=reduction)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """As ``allreduce``, all tensors in one exchange."""
        return self.allreduce(tensors, opts)

    @by_device
    def reduce_scatter(self, outputs: Sequence[torch.Tensor], inputs: Sequence[Any], opts: Any = None) -> Any:
        """Reduces the lists of all ranks; item i goes to rank i."""
        listed, output = list(inputs[0]), outputs[0]
        if any(each.shape != output.shape for each in listed):
            shapes = ", ".join(str(list(each.shape)) for each in (output, *listed))
            raise UsageError(f"reduce_scatter: all tensors have one shape, not {shapes}")
        packed = torch.stack([writable(each, "reduce_scatter", reduced=True) for each in listed])
        return self._scatter_reduced([output], [packed], opts, "reduce_scatter")

    @by_device
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """Reduces each input; part i of it goes to rank i. All in one exchange."""
        return self._scatter_reduced(outputs, inputs, opts, "reduce_scatter_tensor")

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """Reduces the input; part i of it goes to rank i."""
        opts = opts or torch_distributed.ReduceScatterOptions()
        is_async, op = getattr(opts, "asyncOp", True), key_of(opts.reduceOp)
        key = ("reducescatter", is_async, op, input.dtype, input.numel(), output.dtype, output.numel())
        if (work := self._exchange.again(key, opts, input, output)) is not None:
            return work
        if not is_for_horo(output):
            return self.other_devices.group(output.device).reduce_scatter_single(output, input, opts)
        return self._scatter_reduced([output], [input], opts, "reduce_scatter_tensor", key)

    _reduce_scatter_base = reduce_scatter_single

    def _scatter_reduced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any, what: str, key: Any = None
    ) -> Any:
        opts = opts or torch_distributed.ReduceScatterOptions()
        _check_parts(outputs, inputs, self._size, what)
        sources = [writable(each, what, reduced=True) for each in inputs]
        targets = [_memory(each, what) for each in outputs]
        call = GroupCall(
            "reducescatter",
            sources,
            targets,
            outputs,
            _copies(outputs, targets),
            reduction_of(opts.reduceOp, what),
            rows=self._size,
            key=key,
        )
        return self._exchange.do(call, opts)

    # -- moves ---------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """The tensors of the root go to all ranks."""
        opts = opts or torch_distributed.BroadcastOptions()
        tensor, root = tensors[0], opts.rootRank
        key = ("broadcast", getattr(opts, "asyncOp", True), root, tensor.dtype, tensor.numel())
        if len(tensors) == 1 and (work := self._exchange.again(key, opts, tensor)) is not None:
            return work
        if not is_for_horo(tensor):
            return self.other_devices.group(tensor.device).broadcast(tensors, opts)
        return self._in_place("broadcast", "broadcast", tensors, opts, key, root=root)

    @by_device
    def allgather(self, outputs: Sequence[Any], inputs: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """The tensor of rank i goes to item i of the list of outputs."""
        listed, source = list(outputs[0]), inputs[0]
        _check_list(listed, self._size, "all_gather")
        if any(each.numel() != source.numel() for each in listed):
            shapes = ", ".join(str(list(each.shape)) for each in (source, *listed))
            raise UsageError(f"all_gather: all tensors have the size of the input, not {shapes}")
        flat = torch.empty((self._size, source.numel()), dtype=source.dtype, device=_CPU)
        after = _copies(listed, [row.view(each.shape) for row, each in zip(flat, listed, strict=True)])
        call = GroupCall("allgather", [writable(source, "all_gather")], [flat], listed, after)
        return self._exchange.do(call, opts)

    @by_device
    def allgather_coalesced(self, output_lists: Sequence[Any], inputs: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """As ``allgather`` of each input, in one exchange: item j of list i is what rank i has given as its input j."""
        listed = [list(each) for each in output_lists]
        _check_list(listed, self._size, "all_gather_coalesced")
        flats = [torch.empty((self._size, *each.shape), dtype=each.dtype, device=_CPU) for each in inputs]
        results = [tensor for of_rank in listed for tensor in of_rank]
        parts = [flat[rank] for rank in range(self._size) for flat in flats]
        sources = [writable(each, "all_gather_coalesced") for each in inputs]
        return self._exchange.do(GroupCall("allgather", sources, flats, results, _copies(results, parts)), opts)

    @by_device
    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """The input of rank i goes to part i of the output, for each pair; all in one exchange."""
        return self._gather_into(outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """The input of rank i goes to part i of the output."""
        is_async = getattr(opts, "asyncOp", True)
        key = ("allgather", is_async, input.dtype, input.numel(), output.dtype, output.numel())
        if (work := self._exchange.again(key, opts, input, output)) is not None:
            return work
        if not is_for_horo(output):
            return self.other_devices.group(output.device).all_gather_single(output, input, opts)
        return self._gather_into([output], [input], opts, key)

    _allgather_base = all_gather_single

    def _gather_into(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any, key: Any = None
    ) -> Any:
        _check_parts(inputs, outputs, self._size, "all_gather_into_tensor")
        sources = [writable(each, "all_gather_into_tensor") for each in inputs]
        targets = [_memory(each, "all_gather_into_tensor") for each in outputs]
        call = GroupCall("allgather", sources, targets, outputs, _copies(outputs, targets), key=key)
        return self._exchange.do(call, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Any:
        """The rows of the input for rank i go to rank i; the output has the rows of all ranks in their order.

        Without splits, each rank gets equally many rows.
        """
        is_async, splits = getattr(opts, "asyncOp", True), (*output_splits, *input_splits)
        key = ("alltoall", is_async, input.dtype, input.shape, output.dtype, output.shape, splits, len(input_splits))
        if (work := self._exchange.again(key, opts, input, output)) is not None:
            return work
        if not is_for_horo(output):
            others = self.other_devices.group(output.device)
            return others.all_to_all_single(output, input, output_splits, input_splits, opts)
        what = "all_to_all_single"
        source, target = writable(input, what), _memory(output, what)
        sent = _splits(input, input_splits, self._size, "input")
        _splits(output, output_splits, self._size, "output")
        call = GroupCall("alltoall", [source], [target], [output], _copies([output], [target]), splits=sent, key=key)
        return self._exchange.do(call, opts)

    alltoall_base = all_to_all_single

    @by_device
    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Item i of the inputs goes to rank i; item i of the outputs comes from rank i."""
        what = "all_to_all"
        outputs, inputs = list(outputs), list(inputs)
        _check_list(outputs, self._size, what)
        _check_list(inputs, self._size, what)
        source = torch.cat([writable(each, what).view(-1) for each in inputs])
        target = torch.empty(sum(each.numel() for each in outputs), dtype=outputs[0].dtype, device=_CPU)
        parts = torch.split(target, [each.numel() for each in outputs])
        after = _copies(outputs, [part.view(each.shape) for part, each in zip(parts, outputs, strict=True)])
        splits = [each.numel() for each in inputs]
        return self._exchange.do(GroupCall("alltoall", [source], [target], outputs, after, splits=splits), opts)

    def barrier(self, opts: Any = None) -> Any:
        """Done when all ranks have called it."""
        opts = opts or torch_distributed.BarrierOptions()
        key = ("barrier", getattr(opts, "asyncOp", True))
        return self._exchange.again(key, opts) or self._exchange.do(GroupCall("barrier", [], [], [], key=key), opts)

    # -- to and from one rank ------------------------------------------------------------------------------------------

    @by_device
    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """Reduces the tensors of all ranks into that of the root; those of the others stay as they are."""
        reduction = reduction_of(opts.reduceOp, "reduce")
        memory = [writable(each, "reduce", reduced=True) for each in tensors]
        if self._rank != opts.rootRank:
            return self._exchange.do(GroupCall("reduce", memory, [], [], None, reduction, opts.rootRank), opts)
        after = _copies(tensors, memory)
        return self._exchange.do(GroupCall("reduce", memory, memory, tensors, after, reduction, opts.rootRank), opts)

    @by_device
    def gather(self, outputs: Sequence[Any], inputs: Sequence[torch.Tensor], opts: Any) -> Any:
        """The tensor of rank i goes to item i of the list of outputs, on the root."""
        (source,) = (writable(each, "gather") for each in inputs)
        if self._rank != opts.rootRank:
            return self._exchange.do(GroupCall("gather", [source], [], [], root=opts.rootRank), opts)
        listed = list(outputs[0])
        _check_list(listed, self._size, "gather")
        _check_parts([source] * self._size, listed, 1, "gather")
        flat = torch.empty((self._size, source.numel()), dtype=source.dtype, device=_CPU)
        after = _copies(listed, [row.view(each.shape) for row, each in zip(flat, listed, strict=True)])
        return self._exchange.do(GroupCall("gather", [source], [flat], listed, after, root=opts.rootRank), opts)

    @by_device
    def scatter(self, outputs: Sequence[torch.Tensor], inputs: Sequence[Any], opts: Any) -> Any:
        """Item i of the list of inputs of the root goes to rank i."""
        (output,) = outputs
        target = _memory(output, "scatter")
        after = _copies([output], [target])
        if self._rank != opts.rootRank:
            return self._exchange.do(GroupCall("scatter", [], [target], [output], after, root=opts.rootRank), opts)
        listed = list(inputs[0])
        _check_list(listed, self._size, "scatter")
        _check_parts([output] * self._size, listed, 1, "scatter")
        source = torch.cat([writable(each, "scatter").view(-1) for each in listed])
        return self._exchange.do(GroupCall("scatter", [source], [target], [output], after, root=opts.rootRank), opts)

    @by_device
    def send(self, tensors: Sequence[torch.Tensor], destination: int, tag: int) -> Any:
        """Sends a tensor to a rank; done when that has it."""
        (tensor,) = tensors
        return self._exchange.send(writable(tensor, "send"), destination, tag)

    @by_device
    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> Any:
        """Receives a tensor from a rank."""
        return self._receive(tensors, source, tag)

    @by_device
    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> Any:
        """Receives a tensor from any rank; the work has its number."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Sequence[torch.Tensor], source: int | None, tag: int) -> Any:
        (tensor,) = tensors
        check_tensor(tensor, "recv")
        target = _memory(tensor, "recv")
        return self._exchange.receive(target, source, tag, [tensor], _copies([tensor], [target]))

    # -- a group of calls ----------------------------------------------------------------------------------------------

    def _start_coalescing(self, device: Any) -> None:
        """Each call is begun at once, so there is nothing to collect."""

    def _end_coalescing(self, device: Any) -> Any:
        return self._exchange.do(GroupCall("barrier", [], [], []), torch_distributed.BarrierOptions())

    def _in_place(
        self,
        op: str,
        what: str,
        tensors: Sequence[torch.Tensor],
        opts: Any,
        key: Any,
        *,
        root: int = 0,
        reduction: Reduction | None = None,
    ) -> Any:
        memory = [writable(each, what, reduced=reduction is not None) for each in tensors]
        call = GroupCall(op, memory, memory, tensors, _copies(tensors, memory), root=root)
        call = call if reduction is None else call._replace(reduction=reduction)
        return self._exchange.do(call._replace(key=key) if len(tensors) == 1 else call, opts)


def _memory(output: torch.Tensor, what: str) -> torch.Tensor:
    """Contiguous memory for a result: that of ``output``, or its own.

    Raises:
        UnsupportedError: the storage has lost its end; ``what`` is the operation.
    """
    if not has_all_memory(output):
        check_tensor(output, f"output of {what}")
    return output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype, device=_CPU)


def _copies(results: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Callable[[], None] | None:
    """Copies what came elsewhere to the tensors of the caller; None: all came where it belongs."""
    pairs = [(result, source) for result, source in zip(results, sources, strict=True) if result is not source]
    if not pairs:
        return None

    def copy() -> None:
        with torch.no_grad():
            for result, source in pairs:
                result.copy_(source)

    return copy


def _check_list(listed: Sequence[Any], size: int, what: str) -> None:
    if len(listed) != size:
        raise UsageError(f"{what}: the group has {size} ranks, and the list {len(listed)} items; give one for each")


def _check_parts(parts: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], size: int, what: str) -> None:
    for part, whole in zip(parts, wholes, strict=True):
        if part.numel() * size != whole.numel() or part.dtype != whole.dtype:
            one, other = f"{list(whole.shape)} {whole.dtype}", f"{list(part.shape)} {part.dtype}"
            if size == 1:
                raise UsageError(f"{what}: {one} and {other} must be alike")
            raise UsageError(f"{what}: in a group of {size} ranks, {one} is not {size} times {other}")


def _splits(tensor: torch.Tensor, splits: Sequence[int], size: int, which: str) -> list[int]:
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise UsageError(f"all_to_all_single: {rows} rows of the {which} are no multiple of {size} ranks")
        return [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise UsageError(
            f"all_to_all_single: {which} splits {list(splits)} are not one number of rows for each of {size} ranks, "
            f"together {rows}"
        )
    return list(splits)
