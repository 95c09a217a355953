"""The reduce operations of torch.distributed in the core's numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch.distributed as torch_distributed

from horo.core.context import REDUCE_OPS
from horo.errors import UnsupportedError

__all__ = ["Reduction", "key_of", "reduction_of"]

_NUMBERS: dict[Any, int] = {
    torch_distributed.ReduceOp.SUM: REDUCE_OPS["sum"],
    torch_distributed.ReduceOp.AVG: REDUCE_OPS["average"],
    torch_distributed.ReduceOp.MIN: REDUCE_OPS["min"],
    torch_distributed.ReduceOp.MAX: REDUCE_OPS["max"],
    torch_distributed.ReduceOp.PRODUCT: REDUCE_OPS["product"],
    torch_distributed.ReduceOp.BAND: REDUCE_OPS["band"],
    torch_distributed.ReduceOp.BOR: REDUCE_OPS["bor"],
    torch_distributed.ReduceOp.BXOR: REDUCE_OPS["bxor"],
}


def _find_key() -> Callable[[Any], Hashable]:
    """Some torches hash a reduction by its number, which takes half the time of asking for its type."""
    try:
        if all(hash(torch_distributed.ReduceOp(kind)) == int(kind) for kind in _NUMBERS):
            return hash
    except TypeError:
        pass
    return operator.attrgetter("op")


key_of = _find_key()
"""A key of a ``ReduceOp``: its type without its factor."""


class Reduction(NamedTuple):
    """A reduction: the core's number of it, and the factor that is multiplied in before, if it has one."""

    number: int
    factor: float | None = None


def reduction_of(op: Any, what: str) -> Reduction:
    """The reduction of ``op``, a ``ReduceOp`` or its type.

    Raises:
        UnsupportedError: horo has none such; the sentence begins with ``what``.
    """
    kind = getattr(op, "op", op)
    number = _NUMBERS.get(kind)
    if number is not None:
        return Reduction(number)
    if kind == torch_distributed.ReduceOp.PREMUL_SUM:
        _, factor = op.__getstate__()
        if isinstance(factor, float):
            return Reduction(REDUCE_OPS["sum"], factor)
        raise UnsupportedError(f"{what}: PREMUL_SUM takes a number as its factor here, not a tensor")
    raise UnsupportedError(f"{what}: {kind} is not one of torch's reductions")
