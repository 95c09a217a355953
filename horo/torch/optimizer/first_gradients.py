"""Finds ranks that read the same samples: their gradients are equal to the bit in the first steps.

Such ranks cost as much as others and add nothing. Nothing else shows it: the loss falls as on one rank.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence

import torch

from horo.torch.engine.request import Request
from horo.torch.engine.results import Gathered
from horo.torch.engine.submit import start_allgather
from horo.torch.engine.tensor_bytes import bytes_of

__all__ = ["FirstGradients", "warn_of_equal"]

_STEPS = 3
_EXACT = 4096
"""The most elements of a gradient of which each counts; of a larger one, sums of so many parts do."""
_UNKNOWN = 0
"""The digest of gradients that are all zero, of such as are not finite, and of none: they may be equal by chance."""


class FirstGradients:
    """Digests of the gradients of this rank, before they are reduced, in its first steps."""

    def __init__(self) -> None:
        self._digests: list[int] = []
        self._parts: dict[str, torch.Tensor] = {}

    @property
    def is_done(self) -> bool:
        """Whether there is one of each of the first steps."""
        return len(self._digests) == _STEPS

    def note(self, name: str, grad: torch.Tensor) -> None:
        """Looks at a gradient of the step in progress, before it is submitted. Autograd is off."""
        flat = grad.detach().flatten()
        if flat.element_size() < 2:
            return  # torch does not calculate with float8
        count, rest = divmod(flat.numel(), _EXACT)
        if count < 2:
            self._parts[name] = flat.clone()
        else:
            self._parts[name] = flat[rest:].view(_EXACT, count).sum(1)

    def end_step(self) -> None:
        """Makes the digest of a step whose gradients have all been looked at."""
        digest = hashlib.blake2b(digest_size=8)
        is_known = False
        for name in sorted(self._parts):  # hooks have come in another order on other ranks
            part = self._parts[name].cpu()
            if not part.isfinite().all():
                is_known = False
                break
            is_known = is_known or bool(part.any())
            digest.update(name.encode() + bytes_of(part))
        self._parts.clear()
        number = int.from_bytes(digest.digest(), "little", signed=True)
        self._digests.append(number if is_known else _UNKNOWN)

    def compare(self, label: str, team: int) -> Request:
        """Begins to gather the digests of all ranks of a team, 24 bytes from each."""
        digests = torch.tensor([self._digests], dtype=torch.int64, device="cpu")
        return start_allgather([digests], f"{label}.check", "samples", sync=True, team=team)


def warn_of_equal(gathered: Gathered, ranks: Sequence[int], own: int) -> None:
    """Warns of ranks whose digests are equal, on the first rank of all.

    Args:
        gathered: The result of ``compare``.
        ranks: Those that take part.
        own: The rank of this process.
    """
    ranks = gathered.present(ranks)
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, digests in zip(ranks, gathered.tensor.tolist(), strict=True):
        if _UNKNOWN not in digests:
            alike.setdefault(tuple(digests), []).append(rank)
    equal = max(alike.values(), key=len, default=[])
    if len(equal) < 2 or own != ranks[0]:
        return
    who = "all ranks" if len(equal) == len(ranks) else f"ranks {', '.join(map(str, equal))}"
    warnings.warn(
        f"{who} had exactly the same gradients in the first {_STEPS} steps, so they seem to read the same samples, and "
        "more ranks gain nothing: give each its part of the data by torch.utils.data.DistributedSampler(dataset, "
        "hvd.size(), hvd.rank()), or a seed of its own by torch.manual_seed(seed + hvd.rank()) after "
        "broadcast_parameters; if this is on purpose, HORO_FIRST_CHECKS=0 ends the comparison",
        stacklevel=2,
    )
