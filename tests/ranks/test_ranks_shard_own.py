"""Samplers of the script's own, which draw by themselves: all ranks read one order, whatever each draws meanwhile."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import RankPool, on
from torch.utils.data import DataLoader

import horo.torch as hvd

FOURS = 12


def with_workers(count: int) -> dict[str, Any]:
    """Options of a loader. A sampler of this module is in no process that is not forked."""
    return {"num_workers": count, "multiprocessing_context": "fork" if count else None}


class Drawn:
    """Draws, while it is read, from all that one can draw from, in fours that belong together."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[int]:
        for four in torch.randperm(FOURS, generator=self.generator).tolist():
            places = random.sample(range(4), 4)
            turned = np.random.rand() < 0.5
            shift = int(torch.randint(4, ()))
            for place in reversed(places) if turned else places:
                yield 4 * four + (place + shift) % 4

    def __len__(self) -> int:
        return 4 * FOURS


def sharded(workers: int = 0, batch_size: int = 4) -> Any:
    loader = DataLoader(range(4 * FOURS), batch_size=batch_size, sampler=Drawn(hvd.rank()), **with_workers(workers))
    return hvd.shard(loader, tail="exact")


@pytest.mark.parametrize("workers", [0, 2])
@on("ranks")
def test_all_ranks_together_read_the_batches_of_one_process(workers: int) -> None:
    loader = sharded(workers)
    first = torch.Generator().manual_seed(0)
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=first)) % 2**62
    for epoch in range(2):
        own = []
        for batch in loader:
            own.append(batch.tolist())
            for _ in range(hvd.rank() + 1):  # as an augmentation does, on each rank another number of times
                torch.rand(1)
                random.random()
                np.random.rand()
        batches = hvd.allgather_object(own)
        random.seed(seed + epoch)
        torch.manual_seed(seed + epoch)
        np.random.seed((seed + epoch) % 2**32)
        alone = DataLoader(range(4 * FOURS), batch_size=4, sampler=Drawn(seed + epoch), generator=first)
        together = [batch for turn in itertools.zip_longest(*batches) for batch in turn if batch]
        assert together == [batch.tolist() for batch in alone]


@on("ranks2")
def test_a_sampler_does_not_change_what_the_script_draws() -> None:
    def draws(seed: int, steps: Iterator[Any]) -> list[Any]:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return [(random.random(), np.random.rand(), torch.rand(1).item()) for _ in steps]

    loader = sharded()
    own = iter(loader)
    assert draws(hvd.rank(), own) == draws(hvd.rank(), iter(range(len(loader))))
    state = random.getstate()
    failing = hvd.shard(DataLoader(range(4), sampler=(random.random() / 0 for _ in range(4))))
    with pytest.raises(ZeroDivisionError):
        iter(failing)
    assert random.getstate() == state


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_with_other_ranks(ranks2: RankPool, ranks4: RankPool, workers: int) -> None:
    def begin() -> tuple[list[list[int]], dict[str, Any]]:
        loader = sharded(workers)
        list(loader)
        batches = iter(loader)
        read = [next(batches).tolist() for _ in range(2)]
        return read, loader.state_dict()

    def go_on(state: dict[str, Any]) -> list[list[int]]:
        loader = sharded(workers)
        loader.load_state_dict(state)
        return [batch.tolist() for batch in loader]

    begun = ranks2.run(begin)
    rest = ranks4.run(go_on, begun[0][1])
    read = [batch for batches, _ in begun for batch in batches] + [batch for batches in rest for batch in batches]
    assert sorted(sample for batch in read for sample in batch) == list(range(4 * FOURS))
    assert sorted(batch[0] // 4 for batch in read if len({sample // 4 for sample in batch}) == 1) == list(range(FOURS))


class InPlace(list[int]):
    """Shuffles itself, so that an order depends on all earlier ones."""

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self)
        return super().__iter__()


@on("ranks2")
def test_a_state_within_an_epoch_that_depends_on_earlier_ones_is_refused_on_all_ranks() -> None:
    def loader() -> Any:
        return hvd.shard(DataLoader(range(32), batch_size=2, sampler=InPlace(range(32))))

    begun = loader()
    list(begun)
    between = begun.state_dict()
    batches = iter(begun)
    next(batches)
    other = loader()
    other.load_state_dict(begun.state_dict())
    with pytest.raises(hvd.UsageError, match=r"the order of InPlace in epoch 1 is another one.*loader\.set_epoch\(2\)"):
        iter(other)
    other.set_epoch(2)
    assert len(list(other)) == 8
    other.load_state_dict(between)
    assert len(list(other)) == 8


class Reused:
    """A batch sampler that yields one object again and again, or what can be read once."""

    def __init__(self, kind: str) -> None:
        self.generator = np.random.default_rng(0)
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        batch: Any = np.empty(4, int) if self.kind == "array" else []
        for four in self.generator.permutation(4 * FOURS).reshape(-1, 4):
            batch[:] = four
            yield iter(batch.copy()) if self.kind == "iterator" else batch
            batch[:] = [0] * 4

    def __len__(self) -> int:
        return FOURS


@pytest.mark.parametrize("kind", ["list", "array", "iterator"])
@on("ranks2")
def test_a_batch_sampler_may_use_its_batch_again(kind: str) -> None:
    loader = hvd.shard(DataLoader(range(4 * FOURS), batch_sampler=Reused(kind)))
    for _ in range(2):
        own = [sample for batch in loader for sample in batch.tolist()]
        assert sorted(itertools.chain(*hvd.allgather_object(own))) == list(range(4 * FOURS))


class OfEpoch:
    """Another number of samples in each epoch, of which its length is an estimate."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(64), 32 + 8 * self.epoch))

    def __len__(self) -> int:
        return 10 * (self.epoch + 1)


@on("ranks2")
def test_an_epoch_of_another_length_goes_on_at_its_place() -> None:
    def loader() -> Any:
        return hvd.shard(DataLoader(range(64), batch_size=4, sampler=OfEpoch()))

    begun, again = loader(), loader()
    list(begun)
    batches = iter(begun)
    own = [sample for _ in range(4) for sample in next(batches).tolist()]
    again.load_state_dict(begun.state_dict())
    own += [sample for batch in again for sample in batch.tolist()]
    assert len(set(itertools.chain(*hvd.allgather_object(own)))) == 2 * len(own) == 40
    assert len(list(again)) == 6
