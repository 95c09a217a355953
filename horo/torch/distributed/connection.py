"""From the store of a new process group to its connected ranks, and the groups that are open in this process."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from horo.bootstrap.ending import EndReporter
from horo.bootstrap.job import connect
from horo.bootstrap.launchers.torch_store import TorchStore, source_towards
from horo.bootstrap.launchers.variables import Launch
from horo.bootstrap.log import prepare_log
from horo.bootstrap.running_rank import RunningRank, watch
from horo.config.table import LaunchVariables, environment, read_config, read_variables
from horo.core.setup import close_setup
from horo.diagnostics.page import Page
from horo.torch.distributed.steps import StepCounter, Work

__all__ = ["close_job", "open_job"]

_open: dict[int, RunningRank] = {}
"""By identity: the groups that have not been destroyed. They leave at the end of the process."""
_changing = threading.Lock()
_counters: list[StepCounter] = []
"""At most one, from the first group of all ranks on, if hororun reads it."""


class _GroupStore(TorchStore):
    """The store that torch gives a new group; its keys are seen by the members of this group alone."""

    def __init__(self, store: Any) -> None:
        root = store
        while hasattr(root, "underlying_store"):
            root = root.underlying_store
        self.host = str(getattr(root, "host", "")) or None
        """Of the process that serves it; None: it is a file, or memory of this process."""
        self._port = getattr(root, "port", 0)
        super().__init__(store, f"{self.host}:{self._port}" if self.host else type(root).__name__)

    @property
    def place(self) -> str:
        """The port only: ranks may reach one store by different names."""
        return f"torch.distributed:{self._port}"


def open_job(options: Any) -> RunningRank | None:
    """Connects the ranks of a group; blocks until all have come. None: it has one rank, which needs nothing.

    The longest wait for a rank without any progress is the timeout of the group, or ``HORO_START_TIMEOUT`` if that is
    longer.

    Args:
        options: torch's. The store is for this group alone, and the same at every start of a group that is made again.
            The members have the numbers of the world; none are named where the group is the world.
    """
    rank, size = int(options.group_rank), int(options.group_size)
    global_ranks: Sequence[int] = options.global_ranks_in_group
    own = read_variables(LaunchVariables, environment())
    if not global_ranks:
        reporter = EndReporter(own.end_pipe)
        reporter.joined()
        watch(reporter, ends_at_once=reporter.has_reader)
    else:
        reporter = EndReporter(own.end_pipe, tuple(global_ranks))
    if size == 1:
        return None
    config = read_config(environment(), {})
    config = replace(
        config,
        start_timeout_s=max(config.start_timeout_s, options.timeout.total_seconds()),
        stall_shutdown_time_s=0.0,  # each collective has the timeout of the group, which may be longer
        autotune=False,
    )
    prepare_log(config.log_level, rank)
    host = own.hostname or socket.gethostname()
    launch = Launch(
        "torchrun",
        rank,
        size,
        f"{host}, rank {global_ranks[rank]} of the world, group {options.group_id}" if global_ranks else host,
        job_id=f"torch.distributed/{options.group_id}",
        secret=own.secret,
    )
    group_store = _GroupStore(options.store)
    # All ranks have made this group equally often in this store, so the count identifies the start.
    epoch = group_store.add(f"horo/starts/{rank}", 1)
    address = None if group_store.host is None else source_towards(group_store.host)
    connection = connect(launch, config, epoch, [], (group_store, address))
    try:
        job = RunningRank(connection, reporter)
    except BaseException:
        close_setup(connection.setup)
        raise
    job.context.blocked_after_s, job.context.is_alone = config.deadlock_time_s, True
    with _changing:
        _open[id(job)] = job
        if not global_ranks and reporter.has_reader and not _counters:
            _counters.append(StepCounter(job, _work, Page(own.counts_fd)))
    return job


def close_job(job: RunningRank, aborts: str = "") -> None:
    """Leaves the group; what all ranks have begun is finished first. Idempotent; nothing in a forked child.

    ``aborts``: ends it for all at once instead, for this reason.
    """
    with _changing:
        is_open = _open.pop(id(job), None) is not None
        for counter in _counters if is_open else ():
            counter.leaves(job)
    job.close(aborts, aborts=bool(aborts))


def _work() -> list[Work]:
    """Of each group that is open."""
    with _changing:  # so none is freed meanwhile
        return [job.context.work() for job in _open.values()]


def _close_all() -> None:
    """At the end of a program that has not destroyed its groups."""
    pid = os.getpid()
    for job in list(_open.values()):
        with contextlib.suppress(Exception):
            close_job(job)
    logging.getLogger("horo").debug("process %d has left its groups", pid)


atexit.register(_close_all)
