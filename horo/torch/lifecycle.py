"""The beginning and the end of a job: ``init`` and ``shutdown``."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from horo.config.table import check_arguments, environment, read_config
from horo.errors import UsageError
from horo.torch.compat.dynamo import keep_from_dynamo
from horo.torch.compat.rank_zero import tell_rank
from horo.torch.engine.course import SCRIPT_ENDED, SHUT_DOWN
from horo.torch.engine.runtime import Forecast, Runtime, current, process
from horo.torch.engine.steps import Stats
from horo.torch.ops.process_set import ProcessSet, register_all

if TYPE_CHECKING:
    from types import FrameType

    from typing_extensions import Unpack

    from horo.bootstrap.elastic import WorkerMembership
    from horo.config.init_settings import InitSettings
    from horo.config.settings import Settings

__all__ = ["config", "init", "is_initialized", "shutdown", "stats"]


def _refuse_within(caller: FrameType | None) -> None:
    """Refuses an ``init()`` whose thread is at work at the beginning or the end of a job, as a signal handler's may be.

    One that has come to the end of its own has left a job behind, and is as any other code.

    Raises:
        UsageError: The call that it has interrupted is not at that end.
    """
    runtime = process.runtime
    while caller is not None:
        is_init = caller.f_code is init.__code__
        if caller.f_code is shutdown.__code__ or (is_init and (runtime is None or runtime.ended)):
            raise UsageError(
                f"init() was called while {'init()' if is_init else 'shutdown()'} was at work, by a signal handler "
                "perhaps: call it behind that"
            )
        caller = caller.f_back


def init(
    comm: Any = None,
    process_sets: Any = None,
    *,
    device: torch.device | str | int | None = None,
    **settings: Unpack[InitSettings],
) -> None:
    """Joins the job that the launcher (hororun, mpirun, srun, torchrun) has started; without one, a job of size 1.

    Blocks until all ranks have come. Does nothing if the process is in a job already. If that job has ended, because
    another rank has called ``shutdown()`` or is lost, begins a new one. ``shutdown()`` happens at exit.

    Args:
        comm: The processes that form the job. None: all that were started. A list of their ranks: those, in this order;
            only they call ``init``, with the same list. A communicator of mpi4py: its ranks.
        process_sets: Sets of ranks to register at once, as by ``add_process_set``: a list of ``ProcessSet`` or of lists
            of ranks, the same on all ranks. Horovod's ``"dynamic"`` means None, since sets may always be added.
        device: The GPU for ``gpu_operations="nccl"``: ``"cuda:1"``, or its number. None: ``cuda:local_rank`` if this
            process sees several GPUs, and ``cuda:0`` if it sees one.
        settings: Settings by their names, such as ``cycle_time_ms=1``, which win over the environment. None: as if it
            were not given.

    Raises:
        UsageError: The launcher's environment is incomplete, or contradicts MPI. An argument or a setting does not fit,
            or differs from that of the first ``init()``. Two ranks have one GPU for NCCL. This process is a forked
            child of a rank. A signal handler has interrupted ``init()`` or ``shutdown()`` and calls it.
        ResourceError: An MPI started the job, but mpi4py or its MPI library is missing; or NCCL was requested, and this
            rank has none, or no GPU.
        GroupError: Not all ranks came, they do not fit together, or another one has failed in ``init``.

    Example:
        hvd.init()
        print(f"rank {hvd.rank()} of {hvd.size()}")
    """
    _refuse_within(sys._getframe(1))
    added, number = _listed(process_sets), _number_of(device)
    keep_from_dynamo()
    with process.lock:
        if process.runtime is not None and process.runtime.forked:
            raise UsageError("init(): this process was forked from a rank; start ranks as new processes instead")
        process.leave_ended("init()", sys._getframe(1))
        if process.runtime is not None:
            if added:
                raise UsageError("init(process_sets=...): horo is initialized already; use hvd.add_process_set()")
            _check_unchanged(settings, process.runtime.job.settings)
            _check_device(number, process.runtime.job.nccl_device)
            return
        from horo.bootstrap.elastic import membership  # noqa: PLC0415  (the bootstrap is needed only here)

        begin, member = partial(_begin, comm, settings, number, added), membership()
        if member is None:
            begin()
        elif process.forecast is None:
            _begin_elastic(member, begin, settings)


def _begin_elastic(member: WorkerMembership, begin: Callable[[], None], settings: Mapping[str, Any]) -> None:
    """``init()`` in a worker of an elastic job: the first ones join at once, a newcomer does in ``elastic.run``."""
    if member.has_joined:
        raise UsageError("init(): a worker of an elastic job comes into its next generation by hvd.elastic.run only")
    member.begin_with(begin, shutdown)
    if not member.is_newcomer:
        member.join()
        return
    import horo.bootstrap.job  # noqa: F401, PLC0415 - before others wait for this rank in their init()

    seat = member.forecast
    ready = read_config(environment(), settings).gradients_ready_default
    process.forecast = Forecast(seat.rank, len(seat.workers), *seat.local, *seat.cross, True, ready)


def _begin(comm: Any, settings: Mapping[str, Any], device: int | None, added: list[ProcessSet]) -> None:
    """Joins the job, and registers sets of ranks; blocks until all ranks have come."""
    from horo.bootstrap.job import start  # noqa: PLC0415  (the bootstrap is needed only here)

    with process.lock:
        job = start(None, comm, settings, torch.get_num_threads(), device)
        process.runtime = Runtime(job, process.handle_base)
        tell_rank(job.rank)
        process.forecast = None
        if not process.registered:
            process.registered = True
            atexit.register(_at_exit)
            os.register_at_fork(after_in_child=_after_fork_in_child)
    if added:
        try:
            register_all(current(), added)
        except BaseException:
            shutdown()
            raise


def _check_unchanged(wanted: Mapping[str, Any], settings: Settings) -> None:
    for name, value in check_arguments(wanted).items():
        if value != settings[name]:
            raise UsageError(f"init({name}={wanted[name]!r}): horo is initialized already; call hvd.shutdown() before")


def _check_device(wanted: int | None, device: int | None) -> None:
    if wanted is not None and device is not None and wanted != device:
        raise UsageError(
            f"init(device='cuda:{wanted}'): horo is initialized already, with cuda:{device}; call hvd.shutdown() before"
        )


def _number_of(device: torch.device | str | int | None) -> int | None:
    text = f"cuda:{device}" if isinstance(device, int) else str(device or "cuda")
    try:
        given = torch.device(text)
    except RuntimeError:
        given = torch.device("cpu")
    if given.type != "cuda" or str(given) != text:  # torch keeps eight bits of a number
        raise UsageError(f"init(device={device!r}): expected a GPU, such as 'cuda:1' or 1")
    return given.index


def _listed(process_sets: Any) -> list[ProcessSet]:
    if process_sets is None or process_sets == "dynamic":
        return []
    if isinstance(process_sets, (str, ProcessSet)) or not isinstance(process_sets, Iterable):
        raise UsageError(f"init(process_sets={process_sets!r}): expected a list of process sets, or 'dynamic'")
    return [item if isinstance(item, ProcessSet) else ProcessSet(item) for item in process_sets]


def config() -> Settings:
    """The settings that are in force in this job, and where each comes from. Returns at once.

    Returns:
        A mapping from names to values. The names are those of the arguments of ``init()``; ``horovod`` is set by
        ``hororun --horovod`` only. Printed, it is a table with the sources; ``config().source(name)`` is one of them:
        ``"init()"``, the name of an environment variable, ``"hororun --OPTION"``, ``"file NAME"`` for a file of
        ``hororun --config-file``, ``"default"``, or ``"autotune"``: it has another value in force than the job began
        with.

    Raises:
        NotInitializedError: Before ``init()``.
        UsageError: In a forked child of a rank whose job is autotuned.
        AbortedError: After ``shutdown()`` in another thread.

    Example:
        settings = hvd.config()
        print(settings["cycle_time_ms"], settings.source("cycle_time_ms"))
        print(settings)
    """
    runtime = current()
    job = runtime.job
    return runtime.inside("config", job.settings_now) if job.is_tuned else job.settings


def stats() -> Stats:
    """The parts of the time of this rank's steps since ``init()``: of the last one, and of all. Returns at once.

    Any rank may call it at any time; before the first step all numbers are 0. A step is from the end of one ``step()``
    of a ``DistributedOptimizer`` to the end of the next; the first one is not measured. Of several optimizers that take
    turns, one counts them.

    Returns:
        An object with ``steps``, ``last`` and ``total`` (each has ``steps``, ``seconds``, ``computing``, ``waiting``
        for other ranks, ``moving`` data, ``loading``, ``bytes``, ``tensors`` and ``batches``), ``slowest`` (in a job on
        one host, the ``rank`` that the others waited for in the last 64 steps, its ``share`` of them, ``behind_s`` and
        ``loading_s`` in seconds; else None), ``peak_memory`` and ``peak_gpu_memory`` in bytes.

    Raises:
        NotInitializedError: Before ``init()``.

    Example:
        if hvd.rank() == 0:
            last = hvd.stats().last
            print(f"step {1e3 * last.seconds:.1f} ms, waiting {1e3 * last.waiting:.1f}, moving {1e3 * last.moving:.1f}")
    """
    return current().course.meter.stats()


def shutdown() -> None:
    """Leaves the job; pending operations, here and on other ranks, fail with ``AbortedError``.

    Does not block: it does not wait for the other ranks. In a job that has ended, operations of other threads get their
    errors first, which takes a moment. A GPU that still works for horo is waited for, up to about ten seconds if it
    hangs. A second call does nothing; ``init()`` may follow. It happens by itself when the process ends.

    Raises:
        UsageError: Another thread is inside an operation of horo.

    Example:
        hvd.barrier()  # the others have finished their operations, too
        hvd.shutdown()
    """
    _leave(SHUT_DOWN, sys._getframe(1))


def _leave(end: str, caller: FrameType | None) -> None:
    with process.lock:
        if process.runtime is not None and not process.runtime.forked:
            process.leave_ended("shutdown()", caller)
        process.leave(end)


def is_initialized() -> bool:
    """Whether ``init()`` has been called and ``shutdown()`` has not. Returns at once and raises nothing.

    Example:
        if not hvd.is_initialized():
            hvd.init()
    """
    return process.runtime is not None or process.forecast is not None


def _at_exit() -> None:
    # A daemon thread may be inside the core. Then its memory must stay; the peers see the end of the process.
    try:
        _leave(SCRIPT_ENDED, None)
    except UsageError:
        if process.runtime is not None:
            process.runtime.core.log_lines.stop()


def _after_fork_in_child() -> None:
    process.lock = threading.RLock()
    if process.runtime is not None:
        process.runtime.mark_forked()


process.init = init
