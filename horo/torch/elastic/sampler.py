"""A sampler that goes on within an epoch when the ranks of the job have changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch

from horo.elastic.shares import TAILS, Share, Tail, shuffled
from horo.errors import UsageError
from horo.torch.engine import topology

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """The samples of this rank in the rest of an epoch: those that no rank has recorded, shared out anew at each reset.

    As an attribute of a ``TorchState`` it is committed and restored with the model: every sample enters a committed
    step once. Call ``record_batch`` after each step on all ranks, and ``set_epoch`` at the begin or end of each epoch.

    Args:
        dataset: Anything with a length, equal on all ranks; it does not change during the job.
        shuffle: Whether each epoch has an order of its own; it is Horovod's.
        seed: Equal on all ranks.
        tail: The samples at the end of an epoch that cannot be shared out evenly: ``"pad"`` repeats some, as Horovod
            does; ``"drop"`` leaves out up to ``size - 1``; ``"exact"`` takes each once. All ranks have equally many
            batches in any case. With ``"exact"`` the last ones differ in length: multiply the mean loss of each by
            ``weight()``.
        batch_size: That of each rank's loader; needed for ``"exact"``, which also needs ``drop_last=False``.

    Raises:
        UsageError: ``tail`` is another word, or ``"exact"`` without a batch size.
        NotInitializedError: Before ``init()``.

    Example:
        sampler = hvd.elastic.ElasticSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int = 0,
        *,
        tail: Tail = "pad",
        batch_size: int | None = None,
    ) -> None:
        if tail not in TAILS:
            raise UsageError(f"ElasticSampler(tail={tail!r}): expected 'pad', 'exact' or 'drop'")
        if tail == "exact" and (batch_size is None or batch_size < 1):
            raise UsageError(f"ElasticSampler(tail='exact', batch_size={batch_size!r}): give the loader's batch size")
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        """The number of samples of this epoch that all ranks together have recorded."""
        self._tail = tail
        self._batch_size = batch_size or 1
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch: no sample of it is recorded.

        At the begin of an epoch that a commit has brought back in part, it keeps what is recorded.
        """
        if epoch != self.epoch or not self._is_resumed:
            self.epoch = epoch
            self.processed_num = 0
            self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that all ranks have trained with a batch. All ranks call it equally often, before a commit.

        Args:
            batch_idx: Its number; not used.
            batch_size: The number of samples that this rank had in it, or that of a full batch.

        Raises:
            UsageError: More samples than the batch size that ``tail="exact"`` was given.
        """
        if self._tail == "exact":
            if batch_size > self._batch_size:
                raise UsageError(
                    f"ElasticSampler.record_batch: a batch of {batch_size} samples, but batch_size={self._batch_size}"
                )
            batch_size = self._batch_size  # ranks differ in the last ones
        self._taken += batch_size
        self.processed_num = self._begin + self._share.done(self._taken)

    def record_indices(self, indices: Sequence[int]) -> None:
        """As ``record_batch``, with the samples themselves.

        Raises:
            UsageError: They are not this rank's next ones.
        """
        expected = self._own[self._taken : self._taken + len(indices)]
        if list(indices) != expected:
            raise UsageError(f"ElasticSampler.record_indices: {list(indices)}, but the next ones are {expected}")
        self.record_batch(0, len(indices))

    def weight(self) -> float:
        """The factor for this rank's mean loss over the batch that is recorded next; 1 unless ``tail="exact"``."""
        return self._share.weight(self.rank, self._taken)

    def state_dict(self) -> dict[str, int]:
        """The epoch and the number of recorded samples, the same on all ranks."""
        return {"epoch": self.epoch, "processed_num": self.processed_num, "length": len(self.dataset)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where ``state_dict()`` was called.

        Raises:
            UsageError: The dataset has another length by now.
        """
        length = state_dict.get("length", len(self.dataset))
        if length != len(self.dataset):
            raise UsageError(
                f"ElasticSampler: the dataset has {len(self.dataset)} samples, but the state is of one with {length}"
            )
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Shares out what is left of the epoch among the ranks that there are now."""
        self.num_replicas, self.rank = topology.size(), topology.rank()
        length = len(self.dataset)
        order = shuffled(length, self.seed + self.epoch) if self.shuffle else list(range(length))
        self.remaining_indices = order[self.processed_num :]
        self._share = Share(len(self.remaining_indices), self.num_replicas, self._tail, self._batch_size)
        self._own = [self.remaining_indices[place] for place in self._share.positions(self.rank)]
        self._begin = self.processed_num
        self._taken = 0
        self._is_resumed = self.processed_num > 0

    def __iter__(self) -> Iterator[int]:
        self._is_resumed = False
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)
