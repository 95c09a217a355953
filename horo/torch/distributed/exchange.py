"""One collective of a process group as one request to the core, or as copies in a group of one rank."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_distributed

from horo.bootstrap.running_rank import RunningRank
from horo.core import context
from horo.core.context import OPS, RequestBuffer
from horo.errors import AbortedError, HoroError, NotInitializedError, UnsupportedError, UsageError
from horo.torch.compat.profiler import profiling
from horo.torch.distributed.connection import close_job
from horo.torch.distributed.recorded import recorded
from horo.torch.distributed.reduction import Reduction
from horo.torch.distributed.work import DONE, HoroWork, Pending, done
from horo.torch.engine.operation import DTYPES, check_tensor, count_change, has_all_memory
from horo.torch.engine.results import Gathered, gathered

__all__ = ["Exchange", "GroupCall", "writable"]

_PLAIN = Reduction(0)
_TIMEOUT_MAX_MS = _TAG_MAX = 2**31 - 1
_UNSET = timedelta(milliseconds=-1)
"""torch's word for the timeout of the group, in the options of a call."""
_OTHERS_S = 60.0
"""Longest wait at the end of a group on several hosts for sends and receives of others."""
_KEPT_MAX = 1000
"""Most keys with requests that a group keeps for later calls; each takes under 2 KiB."""
_Tensor = torch.Tensor  # looked up once, not per call


class GroupCall(NamedTuple):
    """A collective with its tensors. These are contiguous and in host memory."""

    op: str
    """By its name in ``horo.core.context.OPS``."""
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    """In the order of ``inputs``, perhaps the same ones. Either is empty where another rank alone has them."""
    results: Sequence[torch.Tensor]
    """The tensors of the caller that have the result in the end, for futures."""
    after: Callable[[], None] | None = None
    """Moves the results from ``outputs`` to ``results``."""
    reduction: Reduction = _PLAIN
    root: int = 0
    rows: int = 0
    """Not 0: inputs are this many equal rows, one for each rank."""
    splits: Sequence[int] = ()
    """For an alltoall: rows of the input for each rank. The input has its own shape then."""
    key: Hashable = None
    """For ``Exchange.again``; None: the call has several tensors, or is not likely to come again."""

    def rows_of_core(self) -> list[context.Tensor]:
        """The tensors as the core takes them. Only the number of elements counts, so shapes are flat."""
        return [
            context.Tensor(
                0 if source is None else source.data_ptr(),
                0 if target is None else target.data_ptr(),
                self._shape(source, target),
                DTYPES[(source if target is None else target).dtype],
                output_bytes=0 if target is None else target.numel() * target.element_size(),
                splits=tuple(self.splits),
            )
            for source, target in itertools.zip_longest(self.inputs, self.outputs)
        ]

    def _shape(self, source: Any, target: Any) -> tuple[int, ...]:
        if self.splits:
            return tuple(source.shape)
        if self.op == "scatter":
            return (target.numel(),)
        return (self.rows, source.numel() // self.rows) if self.rows else (source.numel(),)


class Exchange:
    """The ranks of one group, as far as this rank calls them."""

    def __init__(self, job: RunningRank | None, what: str, timeout: timedelta) -> None:
        """``job``: None in a group of one rank. ``what``: the group, for messages. ``timeout``: of each call."""
        self.job = job
        self.pending = None if job is None else Pending(job.context)
        self._what = what
        self._timeout_ms = _milliseconds(timeout)
        self.recorded_as = "horo"
        """The backend in torch's profiler."""
        self._closed = ""
        self._has_paired = False
        """This rank has sent or received, so others may do so without it."""
        self._kept: dict[Hashable, list[RequestBuffer]] = {}
        """The requests for each key of ``again`` that no thread is using; none in a group of one rank."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of what is begun from now on."""
        self._timeout_ms = _milliseconds(timeout)
        self._kept.clear()

    def again(self, key: tuple[Any, ...], opts: Any, source: torch.Tensor | None = None, target: Any = None) -> Any:
        """Does a call that ``do`` has done before, with other memory.

        Args:
            key: equal for calls that differ by their memory alone; its second item is whether the caller does not wait.
            opts: torch's; a call with a timeout of its own is for ``do``.
            source: None: of a barrier.
            target: a tensor; None: the call is in place.

        Returns:
            As ``do``; None: there was no such call, or the tensors are for ``do`` to check.
        """
        if self._closed or profiling._is_profiler_enabled or getattr(opts, "timeout", _UNSET) != _UNSET:
            return None
        if self.pending is None:
            return self._again_alone(key, source, target)
        tensors: tuple[torch.Tensor, ...] = ()
        try:
            buffers = self._kept[key]
            if source is None:
                buffer = buffers.pop()
            else:
                begin = _address(source)
                end = begin if target is None else _address(target)
                if not begin or not end:
                    return None
                buffer = buffers.pop()
                rows = buffer.rows
                rows[0], rows[1] = begin, end
                tensors = (source,) if target is None else (source, target)
        except (LookupError, RuntimeError):  # also where another thread uses it; a tensor without memory
            return None
        work = self._begin(buffer, key[1], tensors, tensors[-1:], None)
        buffers.append(buffer)
        return work

    def _again_alone(self, key: tuple[Any, ...], source: torch.Tensor | None, target: Any) -> Any:
        """``again`` in a group of one rank."""
        if key not in self._kept:
            return None
        if source is None:
            return DONE
        result = source if target is None else target
        if not _address(source) or not _address(result):
            return None
        _copy_alone(source, result)
        count_change((result,))
        return done((result,)) if key[1] else DONE

    def do(self, call: GroupCall, opts: Any) -> Any:
        """Begins a collective, or does it where the caller waits at once; the work that torch gets.

        Raises:
            HoroError: of the request, where the caller waits; the request cannot be begun.
        """
        return recorded(self.recorded_as, call.op, call.inputs, lambda: self._do(call, opts))

    def _do(self, call: GroupCall, opts: Any) -> Any:
        self.check_open()
        is_async = getattr(opts, "asyncOp", True)
        may_keep = call.reduction.factor is None and not any(each.is_complex() for each in call.inputs)
        may_keep &= getattr(opts, "timeout", _UNSET) == _UNSET
        # the key has neither factor nor timeout, a complex tensor may be conjugated lazily
        buffer = RequestBuffer.of(
            OPS[call.op],
            None,
            call.rows_of_core(),
            reduce_op=call.reduction.number,
            prescale=1.0 if call.reduction.factor is None else call.reduction.factor,
            root_rank=call.root,
            sync=not is_async,
            into=call.op in ("allgather", "alltoall"),
            timeout_ms=self._timeout_of(opts),
        )
        if self.pending is None:
            buffer.check()
            for source, target in zip(call.inputs, call.outputs, strict=True):
                _copy_alone(source, target, call.reduction.factor)
            if call.after is not None:
                call.after()
            count_change(call.results)
            if call.key is not None and may_keep:
                self._keep(call.key)
            return done(call.results) if is_async else DONE
        work = self._begin(buffer, is_async, (*call.inputs, *call.outputs), call.results, call.after)
        # ``again`` may have left what is kept
        if call.key is not None and may_keep and not self._kept.get(call.key):
            self._keep(call.key).append(buffer)
        return work

    def _keep(self, key: Hashable) -> list[RequestBuffer]:
        """The requests that are kept for this key."""
        if len(self._kept) >= _KEPT_MAX:
            self._kept.clear()
        return self._kept.setdefault(key, [])

    def _begin(
        self,
        buffer: RequestBuffer,
        is_async: bool,
        tensors: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        after: Callable[[], None] | None,
    ) -> Any:
        """Submits a request on ``tensors``, or runs it; the rest as in ``GroupCall``."""
        pending: Any = self.pending
        if is_async:
            spans = pending.memory.hold_back(tensors)
            end = None if after is None else lambda _: after()
            return self._work(pending.core.submit, buffer, tensors, results, end, spans=spans)
        if pending.memory:
            pending.memory.hold_back(tensors)
        try:
            pending.core.run(buffer)
        except BaseException:  # of a signal handler, perhaps: then the request goes on
            pending.core.release_or_keep(buffer.last_handle[0], tensors)
            raise
        if after is not None:
            after()
        count_change(results)
        return DONE

    def _work(
        self,
        begin: Callable[[RequestBuffer], object],
        buffer: RequestBuffer,
        tensors: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        after: Callable[[int], int | HoroError | None] | None,
        *,
        spans: Sequence[tuple[int, int]] = (),
    ) -> HoroWork:
        """Has the core begin an operation on ``tensors``, whose handle it writes into the buffer."""
        pending: Any = self.pending
        buffer.last_handle[0] = 0
        try:
            begin(buffer)
            return HoroWork(pending, buffer.last_handle[0], tensors, results, after, spans=spans)
        except BaseException:  # of a signal handler, perhaps: then the request goes on
            if handle := buffer.last_handle[0]:
                pending.core.release_or_keep(handle, tensors)
            raise

    def gather_rows(
        self,
        rows: Sequence[torch.Tensor],
        finish: Callable[..., HoroError | None],
        results: Sequence[torch.Tensor],
        opts: Any,
    ) -> Any:
        """Gathers rows of all ranks, of any number each; ``finish`` gets them as ``Gathered``, for ``results``."""
        name = "sparse_all_reduce"
        return recorded(self.recorded_as, name, rows, lambda: self._gather_rows(rows, finish, results, opts))

    def _gather_rows(
        self,
        rows: Sequence[torch.Tensor],
        finish: Callable[..., HoroError | None],
        results: Sequence[torch.Tensor],
        opts: Any,
    ) -> Any:
        self.check_open()
        if self.pending is None:
            finish([Gathered(each, [len(each)]) for each in rows])
            return done(results)
        tensors = [context.Tensor(each.data_ptr(), 0, each.shape, DTYPES[each.dtype]) for each in rows]
        core = self.pending.core
        buffer = RequestBuffer.of(OPS["allgather"], None, tensors, timeout_ms=self._timeout_of(opts))
        taken = [context.TakenResult(core.size) for _ in rows]

        def take(handle: int) -> HoroError | None:
            found = (core.take_result(handle, index, each) for index, each in enumerate(taken))
            return finish([gathered(*each, tensor) for each, tensor in zip(found, rows, strict=True)])

        work = self._work(core.submit, buffer, rows, results, take)
        if not getattr(opts, "asyncOp", True):
            work.wait()
        return work

    def _timeout_of(self, opts: Any) -> int:
        timeout = getattr(opts, "timeout", _UNSET)
        return _milliseconds(timeout) if timeout > timedelta(0) else self._timeout_ms

    def send(self, source: torch.Tensor, peer: int, tag: int) -> Any:
        """Begins to send to a rank."""
        pending = self._core("send", tag)
        tensor = context.Tensor(source.data_ptr(), source.data_ptr(), (source.numel(),), DTYPES[source.dtype])

        def begin(buffer: RequestBuffer) -> None:
            pending.core.send(tensor, peer, tag, timeout_ms=self._timeout_ms, buffer=buffer)

        def work() -> HoroWork:
            return self._work(begin, RequestBuffer(), [source], (), None)

        return recorded(self.recorded_as, "send", [source], work)

    def receive(
        self,
        target: torch.Tensor,
        peer: int | None,
        tag: int,
        results: Sequence[torch.Tensor],
        after: Callable[[], None] | None,
    ) -> Any:
        """Begins to receive from a rank; None: from any. ``after`` moves what has come to ``results``."""
        pending = self._core("recv", tag)
        tensor = context.Tensor(target.data_ptr(), target.data_ptr(), (target.numel(),), DTYPES[target.dtype])
        core = pending.core

        def finish(handle: int) -> int:
            if after is not None:
                after()
            return core.source(handle)

        def begin(buffer: RequestBuffer) -> None:
            core.receive(tensor, peer, tag, timeout_ms=self._timeout_ms, buffer=buffer)

        def work() -> HoroWork:
            return self._work(begin, RequestBuffer(), [target], results, finish)

        return recorded(self.recorded_as, "recvAnySource" if peer is None else "recv", [target], work)

    def _core(self, what: str, tag: int) -> Pending:
        self.check_open()
        if self.pending is None:
            raise UsageError(f"{what}: {self._what} has one rank only")
        if not 0 <= tag <= _TAG_MAX:
            raise UsageError(f"{what}: tag {tag}; tags are 0 to {_TAG_MAX}")
        self._has_paired = True
        return self.pending

    def check_open(self) -> None:
        """Raises NotInitializedError after the end of the group."""
        if self._closed:
            raise NotInitializedError(f"{self._what}: {self._closed}")

    def abort(self, why: str, words: str) -> None:
        """Ends the group at once, here and for all others, who get ``words``; other threads may wait meanwhile."""
        if self._closed:
            return
        self._closed = why
        if self.job is not None and self.pending is not None:
            close_job(self.job, words)
            self.pending.stop()
            self.pending.settle_all()

    def close(self, why: str) -> None:
        """Leaves the group, when others have done what this rank has begun."""
        if self._closed:
            return
        # a rank that fails is waited for by others, rather than the reverse
        is_well = isinstance(sys.exc_info()[1], (type(None), StopIteration, SystemExit))
        if self._has_paired and is_well and self.job is not None and len(self.job.hosts) > 1:
            self._await_others()
        self._closed = why
        if self.job is None or self.pending is None:
            return
        self.pending.stop()
        close_job(self.job)
        self.pending.give_up(AbortedError(f"{self._what}: {why}"))

    def _await_others(self) -> None:
        """A rank that leaves ends sends between hosts, which pass through the leaders. So all leave at once."""
        opts = torch_distributed.BarrierOptions()
        opts.timeout = timedelta(milliseconds=_TIMEOUT_MAX_MS)  # that of the group would end it
        with contextlib.suppress(HoroError):
            work = self.do(GroupCall("barrier", [], [], []), opts)
            work.wait(timedelta(seconds=_OTHERS_S))


def _milliseconds(timeout: timedelta) -> int:
    """For the core: at least 1, at most what it can take."""
    return max(1, min(int(timeout / timedelta(milliseconds=1)), _TIMEOUT_MAX_MS))


def _address(tensor: torch.Tensor) -> int:
    """The address of a tensor that the core can work on as it is; else 0, or RuntimeError where it has no memory."""
    if (
        type(tensor) is _Tensor
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_nested
        and has_all_memory(tensor)
    ):
        return tensor.data_ptr()
    return 0


def _copy_alone(source: torch.Tensor, target: torch.Tensor, factor: float | None = None) -> None:
    """The part of a group of one rank in a collective, whose tensors are contiguous."""
    with torch.no_grad():
        if target.data_ptr() != source.data_ptr():  # FSDP gathers from the place of the result
            target.view(-1).copy_(source.view(-1))
        if factor is not None:
            target.mul_(factor)


def writable(tensor: torch.Tensor, what: str, *, reduced: bool = False) -> torch.Tensor:
    """The memory of a tensor as a contiguous one: itself, or a copy, without a graph.

    Raises:
        UsageError, UnsupportedError: the core cannot work on it; ``what`` is the operation.
    """
    is_plain = tensor.dtype in DTYPES and tensor.is_cpu and tensor.is_contiguous() and tensor.numel() > 0
    if not is_plain or not has_all_memory(tensor):
        check_tensor(tensor, what, reduced=reduced)
        if not tensor.is_cpu:
            raise UnsupportedError(
                f"{what}: the tensor is on {tensor.device}; for tensors on GPUs, torch needs NCCL, which this one lacks"
            )
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
