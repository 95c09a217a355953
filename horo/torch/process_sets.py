"""Sets of ranks. For now there is one: all ranks of the job."""

from __future__ import annotations

from typing import Any

from horo.errors import UnsupportedError
from horo.torch import _runtime

__all__ = ["ProcessSet", "check_process_set", "global_process_set"]


class ProcessSet:
    """A set of ranks that communicate among themselves.

    Only ``global_process_set`` exists for now; making another one raises ``UnsupportedError``.

    Example:
        everyone = hvd.global_process_set.ranks
        print(everyone)  # on 2 ranks [0, 1]
    """

    process_set_id: int | None

    def __init__(self, ranks_or_comm: Any) -> None:
        raise UnsupportedError(
            f"ProcessSet({ranks_or_comm!r}): process sets other than global_process_set are not supported yet"
        )

    @property
    def ranks(self) -> list[int] | None:
        """The ranks of the set in rising order; None before ``init()``."""
        return list(range(_runtime.size())) if _runtime.is_initialized() else None

    def size(self) -> int | None:
        """How many ranks the set has; None before ``init()``."""
        return _runtime.size() if _runtime.is_initialized() else None

    def rank(self) -> int | None:
        """This process's position in the set; None before ``init()``."""
        return _runtime.rank() if _runtime.is_initialized() else None

    def included(self) -> bool | None:
        """Whether this process belongs to the set; None before ``init()``."""
        return True if _runtime.is_initialized() else None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    def __init__(self) -> None:
        self.process_set_id = 0


global_process_set: ProcessSet = _GlobalProcessSet()
"""All ranks of the job."""


def check_process_set(process_set: ProcessSet) -> None:
    """Refuses everything but ``global_process_set``.

    Raises:
        UnsupportedError: another value was given.
    """
    if process_set is not global_process_set:
        raise UnsupportedError(f"process_set={process_set!r}: only global_process_set is supported yet")
