"""Several hosts: each steps all parameters, so all must compute the same bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from horo.errors import UnsupportedError, UsageError

__all__ = ["arithmetic", "is_compared", "refuse_different", "refuse_unlike"]

_COMPARED_MOST = 1024
"""The most steps from one comparison to the next."""


def arithmetic() -> tuple[str, str, str]:
    """All that decides about the bits that this process computes: torch, its kernels, the processor."""
    capability = getattr(torch.backends.cpu, "get_cpu_capability", lambda: "")()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return torch.__version__, capability, model


def refuse_unlike(found: Mapping[int, tuple[str, str, str]]) -> None:
    """Refuses hosts that may compute different bits.

    Args:
        found: By rank, its ``arithmetic``.

    Raises:
        UnsupportedError: They differ.
    """
    first, own = next(iter(found.items()))
    for rank, other in found.items():
        for what, one, theirs in zip(("torch", "kernels of torch", "processor"), own, other, strict=True):
            if one != theirs:
                raise UnsupportedError(
                    f"sharding= on several hosts, each of which steps all parameters: {what} {one} at rank {first}, "
                    f"{theirs} at rank {rank}, so hosts may compute different bits; leave sharding out"
                )


def is_compared(step: int) -> bool:
    """Whether hosts compare their parameters after a step: the 1st, 2nd, 4th, ..., then each 1024th."""
    return step % _COMPARED_MOST == 0 or step & (step - 1) == 0


def refuse_different(told: Iterable[Mapping[str, int]], step: int) -> None:
    """Refuses parameters that hosts have stepped to different values.

    Args:
        told: Of each rank, the checksums of the parameters that it owns.
        step: The number of the step.

    Raises:
        UsageError: They have.
    """
    first: dict[str, int] = {}
    for sums in told:
        for name, value in sums.items():
            if first.setdefault(name, value) != value:
                raise UsageError(
                    f"parameter {name!r} is not equal on all hosts after step {step} of this job: they "
                    "compute different bits, or a gradient was changed on one of them; leave sharding out"
                )
