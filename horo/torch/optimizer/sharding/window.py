"""The progress of each rank of a host in a step: a word in their common memory, which outlives its writer."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence

from horo.torch.optimizer.sharding.meeting import is_alive
from horo.torch.optimizer.sharding.pages import PAGE, rounded

__all__ = ["Window"]

_APART = 8
"""Words from one rank's to the next one's, so that they share no cache line."""
_OUT, _ENTERING, _WRITING, _DONE, _FAILED = range(5)
_PHASES = 8
_SETTLE_S = 30.0
"""The longest wait for ranks that are inside a step while the job has ended."""
_LOOK_S = 0.001


class Window:
    """The time in which owners write, as each rank marks it.

    Args:
        descriptor: The memory of the host, which begins with the words.
        index: This rank's place on the host.
        processes: Of all its ranks there, as ``own_process`` describes them.
    """

    def __init__(self, descriptor: int, index: int, processes: Sequence[tuple[str, int, str]]) -> None:
        self._words = memoryview(mmap.mmap(descriptor, self.size(len(processes)))).cast("q")
        self._own = index * _APART
        self._processes = processes
        self.step = 0
        """The number of the step, equal on all ranks."""

    @staticmethod
    def size(ranks: int) -> int:
        """The bytes of the words of so many ranks, in whole pages."""
        return rounded(8 * _APART * ranks) or PAGE

    def enter(self) -> None:
        """This rank begins the next step: it may write soon."""
        self.step += 1
        self._mark(_ENTERING)

    def open(self) -> None:
        """This rank begins to write."""
        self._mark(_WRITING)

    def close(self) -> None:
        """This rank has written all."""
        self._mark(_DONE)

    def fail(self) -> None:
        """This rank has written a part, and writes no more."""
        self._mark(_FAILED)

    def leave(self) -> None:
        """This rank writes no more, after an error. If it has written all in this step, its mark stays."""
        phase = self._phase(self._own // _APART)
        if phase in (_ENTERING, _WRITING):
            self._mark(_OUT if phase == _ENTERING else _FAILED)

    def settle(self) -> list[bool | None]:
        """Called when the job has ended: blocks until no rank of the host writes any more.

        Returns:
            By rank of the host, whether it has stepped what it owns; None: it may have stepped a part.
        """
        deadline = time.monotonic() + _SETTLE_S
        while self._is_busy() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        phases = [self._phase(index) for index in range(len(self._processes))]
        return [None if phase in (_WRITING, _FAILED) else phase == _DONE for phase in phases]

    def _is_busy(self) -> bool:
        return any(
            self._phase(index) in (_ENTERING, _WRITING) and is_alive(process)
            for index, process in enumerate(self._processes)
            if index * _APART != self._own
        )

    def _mark(self, phase: int) -> None:
        self._words[self._own] = self.step * _PHASES + phase

    def _phase(self, index: int) -> int:
        """The phase of a rank in this rank's step."""
        step, phase = divmod(self._words[index * _APART], _PHASES)
        if step > self.step:
            return _DONE
        return phase if step == self.step else _OUT
