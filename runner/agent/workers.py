"""The workers of an elastic job on one host: each comes and goes by itself, and memory for commits outlives it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

from horo.diagnostics.on_signal import STACKS_SIGNAL
from horo.elastic import commits
from horo.errors import ResourceError
from horo.runner.agent.command import StartError
from horo.runner.agent.rank_counts import shows_stack
from horo.runner.agent.ranks import Event, HostRanks
from horo.runner.config import EXIT_SETUP
from horo.runner.loop import Loop
from horo.runner.processes import Guard, Tree, send_signal

__all__ = ["WORKER_NAME", "HostWorkers"]

WORKER_NAME = "HORO_WORKER"
"""The variable that has the number of a worker."""

_COMMON = "common"
"""In the place of a slot: of the memory that all workers have."""

_STACK_S = 0.2
"""From the request for a stack to SIGKILL."""


class HostWorkers(HostRanks):
    """Its workers; those of one slot follow each other, and the next one finds the commits of those before."""

    def __init__(self, loop: Loop, guard: Guard, tree: Tree, grace_s: float, emit: Callable[[Event], None]) -> None:
        super().__init__(loop, guard, tree, grace_s, emit, each_has=WORKER_NAME)
        self._memories: dict[Hashable, int] = {}  # by slot, and the common one

    def start_worker(
        self,
        command: Sequence[str],
        worker: int,
        slot: Hashable,
        environment: Mapping[str, str],
        *,
        cwd: str,
        host: str,
    ) -> None:
        """Starts a worker.

        Args:
            command: of its process.
            worker: its number, which no other one has.
            slot: its place on this host, which no other one has now.
            environment: of its process.
            cwd: where it starts.
            host: name of this host, for messages.

        Raises:
            StartError: it cannot be started, for the named reason.
        """
        own, common = self._memory_of(slot, host), self._memory_of(_COMMON, host)
        words = {"HORO_COMMIT_FD": commits.words_of(own), "HORO_HOST_COMMIT_FD": commits.words_of(common)}
        variables = {**environment, WORKER_NAME: str(worker), **words}
        self.start(command, {worker: variables}, cwd, host, pass_fds=[own, common])

    def end_worker(self, worker: int, *, at_once: bool) -> None:
        """SIGTERM to a worker and its process group, and SIGKILL after the grace time, or at once.

        A worker that is killed so shows its stack before, if it can.
        """
        if at_once:
            self._kill(worker)
        else:
            self.kill_rank(worker, signal.SIGTERM)
            self._loop.call_later(self._grace_s, partial(self._kill, worker))

    def _kill(self, worker: int) -> None:
        asked = [pid for pid, record in self._ranks.items() if record.rank == worker and shows_stack(pid)]
        send_signal(asked, STACKS_SIGNAL)
        if asked:
            self._loop.call_later(_STACK_S, partial(self.kill_rank, worker))
        else:
            self.kill_rank(worker)

    def _memory_of(self, slot: Hashable, host: str) -> int:
        if slot not in self._memories:
            try:
                self._memories[slot] = commits.create()
            except ResourceError as error:
                raise StartError(f"host {host}: {error}", EXIT_SETUP) from error
        return self._memories[slot]

    def close(self) -> None:
        """Closes the descriptors that are open, and so the memories."""
        super().close()
        for memory in self._memories.values():
            os.close(memory)
        self._memories.clear()
