"""Averages of metrics over everything that all ranks have seen."""

from __future__ import annotations

import math
import reprlib

import torch

from horo.errors import UsageError
from horo.torch.ops.allreduce import Sum, allreduce
from horo.torch.ops.process_set import ProcessSet, global_process_set

__all__ = ["MetricAverage"]


class MetricAverage:
    """Weighted means of metrics over all ranks: adds up on each rank, and exchanges a few numbers when they are asked.

    The weight of a value is usually the number of its samples. Then the results are the means over all samples, even if
    ranks have different numbers of them, or none.

    Args:
        names: Of the metrics, equal on all ranks and in the same order.
        process_set: The ranks over which ``compute()`` averages.

    Raises:
        UsageError: There is no name, or one is there twice.

    Example:
        averages = hvd.MetricAverage("loss", "accuracy")
        for images, labels in [(torch.ones(3, 2), torch.ones(3)), (torch.ones(1, 2), torch.zeros(1))]:
            loss, accuracy = (images.sum(1) - labels).mean(), (labels == 1).float().mean()
            averages.update(len(labels), loss=loss, accuracy=accuracy)  # exchanges nothing
        print(averages.compute())  # {'loss': 1.25, 'accuracy': 0.75}, of all ranks, on all
        averages.reset()
    """

    def __init__(self, *names: str, process_set: ProcessSet = global_process_set) -> None:
        if not names or len(set(names)) != len(names) or not all(isinstance(name, str) and name for name in names):
            raise UsageError(f"MetricAverage{names}: expected the names of the metrics, each once")
        self._names = names
        self._process_set = process_set
        self.reset()

    def update(self, weight: float = 1, /, **values: torch.Tensor | float) -> None:
        """Adds values of this rank. Exchanges nothing, and does not wait for a GPU.

        Args:
            weight: Of these values; 0 leaves them out, whatever they are.
            values: By name, numbers or tensors of one element. A metric that is not named gets nothing.

        Raises:
            UsageError: A name is unknown, a value is not one number, or the weight is negative or not finite.
        """
        number = _number(weight)
        if number is None or not 0 <= number < math.inf:
            raise UsageError(f"MetricAverage.update({_shown(weight)}, ...): a weight is a number from 0 on")
        ones = {name: self._one(name, value) for name, value in values.items()}
        if number == 0:  # the mean of no samples is NaN
            return
        sums = {name: self._sums[name] + one.to(torch.float64) * number for name, one in ones.items()}
        self._sums.update(sums)  # after everything that may fail
        for name in sums:
            self._weights[name] += number

    def _one(self, name: str, value: torch.Tensor | float) -> torch.Tensor:
        if name not in self._sums:
            raise UsageError(f"MetricAverage.update({name}=...): its metrics are {', '.join(self._names)}")
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
            return value.detach().reshape(())
        number = None if isinstance(value, torch.Tensor) else _number(value)
        if number is None:
            raise UsageError(f"MetricAverage.update({name}=...): {_shown(value)} is not one number")
        return torch.tensor(number, dtype=torch.float64, device="cpu")

    def compute(self) -> dict[str, float]:
        """The means over all that the ranks have added since the last ``reset()``, equal on all ranks.

        Blocks until all ranks of the set have called it, with or without values of their own.

        Returns:
            By name; NaN for a metric of which no rank has a value.

        Raises:
            NotInitializedError: Before ``init()``.
            UsageError: This rank is not in the process set.
            GroupError: A rank has left, was lost or did not call it in time.
        """
        own = [*(float(total) for total in self._sums.values()), *self._weights.values()]
        name = "metric_average." + ",".join(self._names)
        sent = torch.tensor(own, dtype=torch.float64, device="cpu")
        found = allreduce(sent, name=name, op=Sum, process_set=self._process_set).tolist()
        totals, weights = found[: len(self._names)], found[len(self._names) :]
        return {
            name: total / weight if weight else math.nan
            for name, total, weight in zip(self._names, totals, weights, strict=True)
        }

    def reset(self) -> None:
        """Forgets the values that this rank has added."""
        self._sums = {name: torch.zeros((), dtype=torch.float64, device="cpu") for name in self._names}
        self._weights = dict.fromkeys(self._names, 0.0)


def _number(value: object) -> float | None:
    """A number, or None for anything else: a text, too, even if Python could read it as a number."""
    if isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _shown(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return reprlib.repr(value)
    if value.numel() != 1:
        return f"a tensor of shape {list(value.shape)}"
    return f"a tensor of {value.dtype}" if value.is_complex() else f"{value.item():g}"
