"""Reduces the gradients of several optimizers at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from horo.errors import HoroError
from horo.torch.compat.profiler import span
from horo.torch.engine.request import Request, wait_any
from horo.torch.optimizer.finite import FiniteCheck, checks_finite, finish_checks
from horo.torch.optimizer.membership import Membership

__all__ = ["Reduces", "reduce_together", "wait_last"]


class Reduces(Protocol):
    """The reducer of one optimizer: its part of a reduction has two halves, ``submit_all`` and ``finish_all``."""

    is_reduced: bool
    is_local: bool

    @property
    def membership(self) -> Membership:
        """The optimizer's place in the job."""

    def check_finite(self) -> FiniteCheck:
        """Begins to look for gradients that are not finite, before any is submitted."""

    def submit_all(self) -> Request | None:
        """Submits all gradients that are not in progress; returns the last request."""

    def finish_all(self) -> Iterator[Request]:
        """Waits for all gradients. Yields each request before it waits for it."""

    def reset(self) -> None:
        """Begins anew: nothing is in progress."""


def reduce_together(reducers: Sequence[Reduces]) -> None:
    """Reduces the gradients of several optimizers. All are submitted before any is waited for.

    So ranks do not wait for each other in a circle if they come to the optimizers in different orders. Nor do they if
    the gradients of one need a second round while others are still waited for.

    Raises:
        HoroError: The first failure; the other gradients are reduced.
    """
    failures: dict[Reduces, HoroError] = {}
    last: Request | None = None
    try:
        with torch.no_grad():
            if checks_finite():
                finish_checks([reducer.check_finite() for reducer in reducers])
            for reducer in reducers:
                try:
                    last = reducer.submit_all() or last
                except HoroError as error:
                    failures[reducer] = error
            with span("horo.synchronize"):
                if len(reducers) == 1:
                    wait_last(last)
                # Those that are not registered have submitted nothing.
                is_alone = len(reducers) == 1
                taking_part = [item for item in reducers if is_alone or item.membership.is_registered]
                _finish_together({reducer: reducer.finish_all() for reducer in taking_part}, failures)
    finally:
        for reducer in reducers:
            reducer.reset()
    for reducer in reducers:
        reducer.is_reduced = reducer not in failures
        reducer.is_local = reducer.is_local and not reducer.is_reduced
    if failures:
        raise next(iter(failures.values()))


def _finish_together(steps: dict[Reduces, Iterator[Request]], failures: dict[Reduces, HoroError]) -> None:
    """Goes on with each reducer as soon as the request that it waits for is done; adds errors to ``failures``."""
    waiting: dict[Reduces, Request | None] = dict.fromkeys(steps)
    while waiting:
        requests = [request for request in waiting.values() if request is not None]
        if len(requests) == len(waiting) > 1:
            wait_any(requests)
        for reducer, request in list(waiting.items()):
            if request is not None and len(waiting) > 1 and not request.is_done():
                continue
            try:
                waiting[reducer] = next(steps[reducer])
            except StopIteration:
                del waiting[reducer]
            except HoroError as error:
                failures.setdefault(reducer, error)
                del waiting[reducer]


def wait_last(request: Request | None) -> None:
    """Waits for the request that was submitted last. Older ones are done then as well, in one drive of the engine."""
    if request is not None:
        request.wait_done()
