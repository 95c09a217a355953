"""The protocol of a strategy: how the ranks of an optimizer do the same step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from horo.torch.optimizer.membership import Membership

__all__ = ["Strategy"]


class Strategy(Protocol):
    """A way to have all ranks do the same step: what an optimizer calls of it, and what it shows its users of it."""

    membership: Membership
    """The optimizer's place in the job."""
    handles: dict[torch.Tensor, Any]
    """The requests in progress, by parameter."""

    @property
    def undo_step(self) -> Callable[[], None] | None:
        """Called when a step has raised; None: it leaves what it has changed."""

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch step pre-hook: it may return other arguments, with another closure."""

    def after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A torch step post-hook."""

    def synchronize(self) -> None:
        """Called by the user: ranks come to the same gradients, if it is gradients that they reduce."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Called by the user: inside, ``step()`` takes gradients as they are."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Called by the user: inside, backward only accumulates locally."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Called by the user: how many backward passes accumulate locally."""

    def refuse_while_pending(self, what: str) -> None:
        """Called before gradients are cleared: raises if the core still uses them."""

    def drain(self) -> None:
        """Called before a state is loaded: ends what is in progress."""

    def copy_for(self, optimizer: torch.optim.Optimizer, twins: dict[torch.Tensor, torch.Tensor]) -> Strategy:
        """The same for a copy of the optimizer; ``twins``: its parameters by those of this one."""
