"""Each rank's part of a DataLoader: together those of one process, in its order, whatever it is made of and draws."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import RankPool, on
from torch.utils import data
from torch.utils.data import DataLoader

import horo.torch as hvd
from horo.elastic.shares import TAILS, Tail

Batches = list[list[int]]
FOURS = 12


def with_workers(count: int) -> dict[str, Any]:
    """Options of a loader. Its dataset is of this module, which no process can import that is not forked."""
    return {"num_workers": count, "multiprocessing_context": "fork" if count else None}


def epoch_of(loader: Any) -> Batches:
    return [batch.tolist() for batch in loader]


def whole_order(epochs: list[Batches]) -> list[int]:
    """The samples of an epoch as all ranks together have read them, batch by batch, of each rank in turn."""
    order = []
    for batches in itertools.zip_longest(*epochs, fillvalue=[]):
        rounds = itertools.zip_longest(*batches)
        order += [sample for samples in rounds for sample in samples if sample is not None]
    return order


def read_in(epochs: list[Batches]) -> Counter[int]:
    """How often each sample was read."""
    return Counter(sample for batches in epochs for batch in batches for sample in batch)


SAMPLERS: dict[str, Callable[[torch.Generator | None], Any]] = {
    "sequential": lambda _: data.SequentialSampler(range(26)),
    "random": lambda generator: data.RandomSampler(range(26), generator=generator),
    "replacement": lambda generator: data.RandomSampler(range(26), True, 10**10, generator),
    "subset": lambda generator: data.SubsetRandomSampler(range(0, 52, 2), generator=generator),
    "weighted": lambda generator: data.WeightedRandomSampler([1.0, 2.0] * 13, 26, generator=generator),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("own", [False, True], ids=["torch's seed", "a generator"])
@on("ranks")
def test_all_ranks_together_read_the_order_of_one_process(name: str, own: bool) -> None:
    torch.manual_seed(hvd.rank() + 5)
    generator = torch.Generator().manual_seed(hvd.rank() + 5) if own else None
    loader = hvd.shard(DataLoader(range(60), batch_size=3, sampler=SAMPLERS[name](generator)), tail="exact")
    assert len(loader) in {10**10 // 3 // hvd.size() + 1, 26 // 3 // hvd.size() + 1, 26 // 3 // hvd.size()}
    drawn = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(5))) % 2**62
    for epoch in range(2):
        found = whole_order(hvd.allgather_object([batch.tolist() for batch in itertools.islice(loader, 5)]))
        assert len(found) == min(26, 15 * hvd.size()) or name == "replacement"
        order = iter(SAMPLERS[name](torch.Generator().manual_seed(drawn + epoch)))
        assert found == list(itertools.islice(order, len(found)))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("length", [0, 1, 16, 17, 23])
@on("ranks4")
def test_the_length_is_that_of_each_ranks_part(length: int, tail: Tail, drop_last: bool) -> None:
    if tail == "exact" and drop_last:
        return
    loader = hvd.shard(DataLoader(range(length), batch_size=2, drop_last=drop_last), tail=tail)
    epochs = hvd.allgather_object(epoch_of(loader))
    assert len(loader) == len(epochs[hvd.rank()])
    read = read_in(epochs)
    if tail == "exact":
        assert read == Counter(range(length))
    else:
        assert len({*map(len, epochs)}) == 1
        assert read.total() - len(read) <= (3 if tail == "pad" else 0)
        assert length - len(read) <= (0 if tail == "pad" and not drop_last else 7)


class Kept(DataLoader[Any]):
    """A class of the script's own."""

    def __iter__(self) -> Any:
        return ((self.bonus, batch) for batch in super().__iter__())

    bonus = 3


@on("ranks2")
def test_class_and_options_of_the_loader_are_kept() -> None:
    options = {"persistent_workers": True, "collate_fn": sum, "worker_init_fn": torch.manual_seed}
    given: Any = Kept(range(20), 2, shuffle=True, **with_workers(2), **options)
    loader = hvd.shard(given)
    assert isinstance(loader, Kept)
    assert type(given) is Kept
    assert len(given) == 10
    for name in ("dataset", "batch_size", "num_workers", *options):
        assert getattr(loader, name) is getattr(given, name)
    sums = [[batch for _, batch in loader] for _ in range(3)]
    assert sums[0] != sums[1] != sums[2]  # an order of its own in each epoch, by workers that stay
    total = hvd.allreduce(torch.tensor(sums).sum(1), op=hvd.Sum)
    assert total.tolist() == [190] * 3


class InPairs:
    """A batch sampler of the script's own, whose order depends on the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[first % 14, (first + 1) % 14] for first in range(self.epoch, 14 + self.epoch, 2)])

    def __len__(self) -> int:
        return 7


@on("ranks2")
def test_samples_are_dealt_out_one_by_one_and_in_whole_batches_of_a_sampler() -> None:
    loader = hvd.shard(DataLoader(range(14), batch_sampler=InPairs()), tail="drop")
    for epoch in range(2):
        first = 2 * hvd.rank() + epoch
        assert epoch_of(loader) == [[place + first, place + first + 1] for place in (0, 4, 8)]
    in_order = data.SequentialSampler(range(9))
    batches = hvd.shard(DataLoader(range(9), batch_sampler=data.BatchSampler(in_order, 2, True)))
    assert epoch_of(batches) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]][hvd.rank()]
    own = hvd.shard(DataLoader(range(10), batch_size=2, sampler=range(10)))
    assert epoch_of(own) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]][hvd.rank()]
    singly = hvd.shard(DataLoader(range(5), batch_size=None))
    assert list(singly) == [[0, 2, 4], [1, 3, 0]][hvd.rank()]


class Stream(data.IterableDataset[int]):
    """A stream that each worker has its part of, in an order by random numbers."""

    length = 23

    def __iter__(self) -> Iterator[int]:
        worker = data.get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        own = list(range(number, self.length, count))
        return iter([own[place] for place in torch.randperm(len(own))] if worker else own)


def lengthen(_: int) -> None:
    """As torch's documents have a worker choose its part."""
    data.get_worker_info().dataset.length = 29


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("workers", [0, 3])
@on("ranks4")
def test_a_stream_is_divided_in_each_worker(workers: int, tail: Tail) -> None:
    torch.manual_seed(hvd.rank())
    stream = DataLoader(Stream(), batch_size=2, **with_workers(workers), worker_init_fn=lengthen)
    loader = hvd.shard(stream, tail=tail)
    assert loader.dataset.length == 23
    for _ in range(2):
        epochs = hvd.allgather_object(epoch_of(loader))
        read, length = read_in(epochs), 29 if workers else 23
        if tail == "exact":
            assert read == Counter(range(length))
            continue
        assert len({tuple(map(len, batches)) for batches in epochs}) == 1
        left = 4 * max(1, workers) - 1
        assert set(read) <= set(range(length))
        assert read.total() - len(read) <= (left if tail == "pad" else 0)
        assert length - len(read) <= (left if tail == "drop" else 0)


@on("ranks2")
def test_a_stream_goes_on_at_its_batch() -> None:
    loader = hvd.shard(DataLoader(Stream(), batch_size=2))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
    again = hvd.shard(DataLoader(Stream(), batch_size=2))
    again.load_state_dict(state)
    assert epoch_of(again) == rest
    other = hvd.shard(DataLoader(Stream(), batch_size=2, **with_workers(1)))
    with pytest.raises(hvd.UsageError, match="a state with 0 workers: it has 1"):
        other.load_state_dict(state)
    with pytest.raises(hvd.UsageError, match="the state lacks 'ranks'"):
        loader.load_state_dict({"epoch": 0})


def distributed() -> Any:
    return data.DistributedSampler(range(4), num_replicas=2, rank=0)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "distributed sampler": (
        lambda: DataLoader(range(4), sampler=distributed()),
        "shard: the loader has a DistributedSampler, which gives each rank its part already",
    ),
    "inside a batch sampler": (
        lambda: DataLoader(range(4), batch_sampler=data.BatchSampler(distributed(), 2, False)),
        "shard: the loader has a DistributedSampler",
    ),
    "elastic sampler": (
        lambda: DataLoader(range(4), sampler=hvd.elastic.ElasticSampler(range(4))),
        "shard: the loader has a ElasticSampler",
    ),
    "sharded": (lambda: hvd.shard(DataLoader(range(4))), "shard: this loader is sharded already"),
    "no loader": (lambda: [1, 2], r"expected a torch.utils.data.DataLoader, not list; .* urls\[hvd.rank\(\)::"),
}


@pytest.mark.parametrize("name", MISTAKES)
@on("ranks2")
def test_a_loader_that_cannot_be_shared_is_refused(name: str) -> None:
    make, sentence = MISTAKES[name]
    with pytest.raises(hvd.UsageError, match=sentence):
        hvd.shard(make())


@on("ranks2")
def test_a_wrong_tail_is_refused() -> None:
    with pytest.raises(hvd.UsageError, match="tail='even'"):
        hvd.shard(DataLoader(range(4)), tail="even")  # type: ignore[arg-type]
    with pytest.raises(hvd.UsageError, match=r"tail='exact' yields every sample, and drop_last=True"):
        hvd.shard(DataLoader(range(4), batch_size=2, drop_last=True), tail="exact")
    if pipe := getattr(torch.utils.data, "IterDataPipe", None):
        with pytest.raises(hvd.UnsupportedError, match="sharding_filter"):
            hvd.shard(DataLoader(type("Pipe", (pipe,), {"__iter__": lambda self: iter([1])})()))


class Unseeded:
    """A sampler of the script's own."""

    def __iter__(self) -> Iterator[int]:
        return iter([hvd.rank(), 2])


DIFFERENCES: dict[str, tuple[Callable[[], Any], str]] = {
    "length": (lambda: DataLoader(range(4 + hvd.rank())), r"their length \(4 and 5\); give all ranks the whole"),
    "batch size": (lambda: DataLoader(range(4), 1 + hvd.rank()), r"their batch size \(1 and 2\); make the loader"),
    "order": (lambda: DataLoader(range(4), sampler=Unseeded()), r"their order; let it draw in its __iter__"),
    "sampler": (
        lambda: DataLoader(range(4), shuffle=hvd.rank() == 0),
        r"their sampler \(RandomSampler and SequentialSampler\); make the loader alike",
    ),
    "split": (
        lambda: DataLoader(data.Subset(data.Subset(range(9), [hvd.rank(), 2, 5, 8]), [0, 1]), shuffle=True),
        "their samples; draw splits and weights by one seed on all ranks",
    ),
    "subset": (lambda: DataLoader(range(9), sampler=data.SubsetRandomSampler([hvd.rank(), 8])), "their samples; draw"),
    "weights": (
        lambda: DataLoader(range(2), sampler=data.WeightedRandomSampler([1.0, 2.0 + hvd.rank()], 2)),
        "their samples; draw",
    ),
    "stream": (lambda: DataLoader(Stream(), **with_workers(hvd.rank())), r"their workers \(0 and 1\)"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
@on("ranks2")
def test_loaders_that_differ_between_ranks_are_an_error_on_all(name: str) -> None:
    make, sentence = DIFFERENCES[name]
    loader = hvd.shard(make())
    with pytest.raises(hvd.UsageError, match=f"the loaders of rank 0 and rank 1 differ in {sentence}"):
        iter(loader)


@on("ranks2")
def test_ranks_in_different_epochs_or_positions_are_an_error_on_all() -> None:
    loader = hvd.shard(DataLoader(range(8)))
    loader.set_epoch(hvd.rank())  # as after a rank has begun an epoch alone
    with pytest.raises(hvd.UsageError, match=r"their epoch \(0 and 1\); call iter\(\) of the loader equally often"):
        iter(loader)
    loader.load_state_dict({"length": 8, "epoch": 0, "done": 2 * hvd.rank(), "seed": 1})
    with pytest.raises(hvd.UsageError, match=r"their position \(0 and 2\); give all ranks one state"):
        iter(loader)
    with pytest.raises(hvd.UsageError, match="a state with 9 length: it has 8"):
        loader.load_state_dict({"length": 9, "epoch": 0, "done": 0, "seed": 1})
    with pytest.raises(hvd.UsageError, match="or its sampler was iterated over"):
        list(loader.sampler)


@on("ranks4")
def test_a_process_set_shares_a_loader() -> None:
    last = hvd.add_process_set([1, 3])
    if last.included():
        loader = hvd.shard(DataLoader(range(6), batch_size=2, shuffle=True), process_set=last)
        everyone = hvd.allgather_object(epoch_of(loader), process_set=last)
        assert sorted(whole_order(everyone)) == list(range(6))
    hvd.remove_process_set(last)
    if last.included():
        with pytest.raises(hvd.UsageError, match=r"call hvd\.shard again on all ranks"):
            iter(loader)


# -- samplers of the script's own, which draw by themselves ----------------------------------------------------------


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
def test_all_ranks_together_read_the_batches_of_an_own_sampler(workers: int) -> None:
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
@pytest.mark.parametrize("batch_size", [3, 4], ids=["other batches", "whole fours of an own sampler"])
def test_an_epoch_goes_on_with_other_ranks(ranks2: RankPool, ranks4: RankPool, batch_size: int, workers: int) -> None:
    def make(batch_size: int, is_own: bool) -> Any:
        if is_own:
            return sharded(workers, batch_size)
        loader = DataLoader(range(4 * FOURS), batch_size=batch_size, shuffle=True, **with_workers(workers))
        return hvd.shard(loader, tail="exact")

    def begin(is_own: bool) -> tuple[Batches, dict[str, Any]]:
        loader = make(4, is_own)
        epoch_of(loader)
        assert loader.state_dict()["epoch"] == 1
        batches = iter(loader)
        read = [next(batches).tolist() for _ in range(2)]
        return read, loader.state_dict()

    def go_on(state: dict[str, Any], is_own: bool) -> list[Batches]:
        loader = make(batch_size, is_own)
        loader.load_state_dict(state)
        assert loader.epoch == 1
        loader.set_epoch(1)  # as a script does that counts epochs itself
        rest = epoch_of(loader)
        assert loader.epoch == 2
        return [rest, epoch_of(loader)]

    is_own = batch_size == 4
    begun = ranks2.run(begin, is_own)
    state = begun[0][1]
    assert (state["epoch"], state["done"]) == (1, 16)
    assert begun[1][1] == state
    rest, next_epoch = zip(*ranks4.run(go_on, state, is_own), strict=True)
    epoch = [*(batches for batches, _ in begun), *rest]
    assert read_in(epoch) == Counter(range(4 * FOURS))
    assert sorted(whole_order(list(next_epoch))) == list(range(4 * FOURS))
    if is_own:
        fours = [batch[0] // 4 for batches in epoch for batch in batches if len({sample // 4 for sample in batch}) == 1]
        assert sorted(fours) == list(range(FOURS))


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
