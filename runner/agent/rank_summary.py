"""The sums of a rank over its steps, which it writes on its pipe at its end; see ``horo/torch/engine/steps.py``."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from horo.runner.text import printable

__all__ = ["NAMES_MAX", "RankSummary", "read_summary"]

_LIMIT = 1 << 62
_SAMPLES_MAX = 4096
NAMES_MAX = 64
"""Of parameters without a gradient: a rank may have more than it tells."""
_COLUMNS = 3


@dataclass(frozen=True)
class RankSummary:
    """The sums of a rank over its steps, and samples of single steps. Times are in nanoseconds.

    Attributes:
        steps: how many it has done.
        within: the one that it was in at its end; 0: none.
        size: the number of ranks of its job.
        measured: the steps that the sums are over.
        ns, waiting, moving, loading: of these in all, blocked for other ranks, blocked for data, for a DataLoader.
        bytes, tensors, batches: exchanged in these.
        samples: of steps, by number: waiting and loading, in microseconds.
        peak, gpu_peak: most bytes of memory, here and on the GPU.
        cores, ranks_here: those of its host, and the ranks that share them.
        on_cpu: 1: it has used no GPU.
        via: how data moved between ranks; empty: it did not.
        unused: parameters without a gradient in its last step.
    """

    steps: int = 0
    within: int = 0
    size: int = 1
    measured: int = 0
    ns: int = 0
    waiting: int = 0
    moving: int = 0
    loading: int = 0
    bytes: int = 0
    tensors: int = 0
    batches: int = 0
    samples: tuple[tuple[int, int, int], ...] = ()
    peak: int = 0
    gpu_peak: int = 0
    cores: int = 0
    ranks_here: int = 0
    on_cpu: int = 0
    via: str = ""
    unused: tuple[str, ...] = ()

    def after(self, earlier: RankSummary | None) -> RankSummary:
        """With the sums of an earlier job of the same process, as an elastic one has."""
        if earlier is None:
            return self
        added = ("steps", "measured", "ns", "waiting", "moving", "loading", "bytes", "tensors", "batches")
        return replace(
            self,
            peak=max(self.peak, earlier.peak),
            gpu_peak=max(self.gpu_peak, earlier.gpu_peak),
            **{name: getattr(self, name) + getattr(earlier, name) for name in added},
        )


_COUNTS = [field.name for field in fields(RankSummary) if field.type == "int"]


def read_summary(value: object) -> RankSummary | None:
    """The summary in a note; None: the note has another value there, since any program may write it."""
    if not isinstance(value, dict):
        return None
    counts = _numbers([value.get(name) for name in _COUNTS])
    rows, via, unused = value.get("samples"), value.get("via"), value.get("unused")
    columns = [_numbers(row) for row in rows] if isinstance(rows, list) and len(rows) == _COLUMNS else []
    samples = [column for column in columns if column is not None]
    names = unused if isinstance(unused, list) and len(unused) <= NAMES_MAX else []
    if counts is None or len(samples) != _COLUMNS or len({len(column) for column in samples}) > 1:
        return None
    return RankSummary(
        **dict(zip(_COUNTS, counts, strict=True)),
        samples=tuple(zip(*samples, strict=True)),
        via=printable(via) if isinstance(via, str) else "",
        unused=tuple(printable(name) for name in names if isinstance(name, str)),
    )


def _numbers(values: object) -> tuple[int, ...] | None:
    if not isinstance(values, list) or len(values) > _SAMPLES_MAX:
        return None
    numbers = [each for each in values if type(each) is int and 0 <= each < _LIMIT]
    return tuple(numbers) if len(numbers) == len(values) else None
