"""The driver of an elastic job, as the loop around a training function needs it."""

from __future__ import annotations

from typing import Protocol

__all__ = ["DriverChange", "DriverLink"]


class DriverChange(Protocol):
    """The workers that have come, or are to leave, since the generation began."""

    @property
    def added(self) -> bool:
        """Whether some wait for the next generation."""

    @property
    def removed(self) -> bool:
        """Whether some are to leave."""

    @property
    def leave(self) -> bool:
        """Whether all are to leave, since the job ends."""


class DriverLink(Protocol):
    """One worker's connection to the driver."""

    @property
    def has_joined(self) -> bool:
        """Whether the worker is in a generation."""

    @property
    def generation(self) -> int:
        """The number of the generation that it has joined last, from 1."""

    def join(self) -> None:
        """Waits until the driver places this worker in the next generation, and enters that."""

    def begun(self) -> None:
        """Called when a training function begins in a generation."""

    def done(self, *, is_kept: bool = False) -> None:
        """Called when it returns on all ranks, or has kept its state for a later job: an error ends the job then."""

    def leave(self, error: BaseException | None, steps_lost: int | None = None) -> None:
        """Leaves the generation, for a reason or because it is to change.

        Reports how many steps since the last commit are undone; None: that is not known.
        """

    def change(self) -> DriverChange | None:
        """The change that the driver has asked for since the generation began. Does not block."""

    def committed(self, number: int, *, is_kept: bool = False) -> None:
        """Reports the number of the last commit, and whether it outlives this process."""
