"""The reductions, and what callers give for them and for their factors."""

from __future__ import annotations

import enum
import reprlib
import warnings
from typing import Any

import torch

from horo.core.context import REDUCE_OPS
from horo.errors import UnsupportedError, UsageError

__all__ = ["ReduceOp", "factor_of", "resolve_op"]


class ReduceOp(enum.IntEnum):
    """The reductions, for ``op=``, with Horovod's numbers: ``hvd.Sum`` is ``hvd.ReduceOp.Sum``.

    In their place every ``op=`` takes their plain number, or the member of ``torch.distributed.ReduceOp`` that has the
    name: ``SUM``, ``AVG``, ``MIN``, ``MAX`` or ``PRODUCT``. Anything else is an error.
    """

    Average = REDUCE_OPS["average"]
    Sum = REDUCE_OPS["sum"]
    Adasum = REDUCE_OPS["adasum"]
    Min = REDUCE_OPS["min"]
    Max = REDUCE_OPS["max"]
    Product = REDUCE_OPS["product"]

    def __repr__(self) -> str:
        return f"hvd.{self.name}"

    __str__ = __repr__


_NAMES = "hvd.Average, Sum, Min, Max, Product or Adasum"
_OF_TORCH = {
    "AVG": ReduceOp.Average,
    "SUM": ReduceOp.Sum,
    "MIN": ReduceOp.Min,
    "MAX": ReduceOp.Max,
    "PRODUCT": ReduceOp.Product,
}
"""By name: the numbers of torch's are others, and each of them is equal to a number."""


def resolve_op(op: int | None, average: bool | None = None, stacklevel: int = 4) -> ReduceOp:
    """The reduction that ``op`` and the deprecated ``average`` ask for.

    Raises:
        UsageError: Both are given, or one of them is something else.
        UnsupportedError: ``op`` is a reduction of ``torch.distributed`` that horo does not have.
    """
    if average is not None:
        if op is not None:
            raise UsageError("op and average were both given; op replaces average, pass only op")
        if not isinstance(average, bool):
            raise UsageError(f"average={average!r} is neither True nor False; pass a reduction as op=, a name as name=")
        warnings.warn(
            "average= is deprecated; use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=stacklevel
        )
        return ReduceOp.Average if average else ReduceOp.Sum
    if op is None:
        return ReduceOp.Average
    if type(op) is ReduceOp:
        return op
    if type(op) is int and op in REDUCE_OPS.values():
        return ReduceOp(op)
    if (name := _name_in_torch(op)) is None:
        raise UsageError(f"op={op!r} is not a reduction; use {_NAMES}")
    if name not in _OF_TORCH:
        raise UnsupportedError(f"op=torch.distributed.ReduceOp.{name} is not offered; use {_NAMES}")
    return _OF_TORCH[name]


def _name_in_torch(op: Any) -> str | None:
    """The name of a reduction of ``torch.distributed``, which not every torch has; None for anything else."""
    family: Any = getattr(torch.distributed, "ReduceOp", None)
    if not hasattr(family, "RedOpType") or not isinstance(op, (family, family.RedOpType)):
        return None
    member = getattr(op, "op", op)  # of an instance, as of a premultiplied sum
    return str(member.name)


def factor_of(value: Any, what: str, argument: str) -> float:
    """A factor of a reduction as a number.

    Args:
        value: A real number, or a tensor with one.
        what: The operation, for the message.
        argument: The name of the factor, for the message.

    Raises:
        UsageError: It is something else.
    """
    if type(value) is float:
        return value
    is_tensor = isinstance(value, torch.Tensor)
    if not isinstance(value, (str, bytes, bytearray, bool)) and not (is_tensor and value.is_complex()):
        try:  # `float` would read a text, and take the real part
            return float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one is torch's
            pass
    shown = f"a tensor of {value.dtype} {list(value.shape)}" if is_tensor else reprlib.repr(value)
    raise UsageError(f"{what}: {argument} must be one real number, not {shown}")
