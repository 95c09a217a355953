"""Each rank's part of a DataLoader: together those of one process, in its order, whatever the loader is made of."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rank_pool import RankPool, on
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import horo.torch as hvd
from horo.elastic.shares import TAILS, Tail

Batches = list[list[int]]


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
    "sequential": lambda _: SequentialSampler(range(26)),
    "random": lambda generator: RandomSampler(range(26), generator=generator),
    "replacement": lambda generator: RandomSampler(
        range(26), replacement=True, num_samples=10**10, generator=generator
    ),
    "subset": lambda generator: SubsetRandomSampler(range(0, 52, 2), generator=generator),
    "weighted": lambda generator: WeightedRandomSampler([1.0, 2.0] * 13, 26, generator=generator),
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
    given: Any = Kept(
        range(20),
        2,
        shuffle=True,
        **with_workers(2),
        persistent_workers=True,
        collate_fn=sum,
        worker_init_fn=torch.manual_seed,
    )
    loader = hvd.shard(given)
    assert isinstance(loader, Kept)
    assert type(given) is Kept
    assert len(given) == 10
    for name in ("dataset", "batch_size", "num_workers", "collate_fn", "worker_init_fn", "persistent_workers"):
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
        for first in range(0, len(self) * 2, 2):
            yield [(first + self.epoch) % 14, (first + self.epoch + 1) % 14]

    def __len__(self) -> int:
        return 7


@on("ranks2")
def test_batches_of_a_batch_sampler_are_dealt_out() -> None:
    loader = hvd.shard(DataLoader(range(14), batch_sampler=InPairs()), tail="drop")
    for epoch in range(2):
        first = 2 * hvd.rank() + epoch
        assert epoch_of(loader) == [[place + first, place + first + 1] for place in (0, 4, 8)]


@on("ranks2")
def test_samples_are_dealt_out_one_by_one_and_in_whole_batches_of_a_sampler_of_the_scripts_own() -> None:
    batches = hvd.shard(DataLoader(range(9), batch_sampler=BatchSampler(SequentialSampler(range(9)), 2, True)))
    assert epoch_of(batches) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]][hvd.rank()]
    own = hvd.shard(DataLoader(range(10), batch_size=2, sampler=range(10)))
    assert epoch_of(own) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]][hvd.rank()]
    singly = hvd.shard(DataLoader(range(5), batch_size=None))
    assert list(singly) == [[0, 2, 4], [1, 3, 0]][hvd.rank()]


class Stream(IterableDataset[int]):
    """A stream that each worker has its part of, in an order by random numbers."""

    length = 23

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        own = list(range(number, self.length, count))
        return iter([own[place] for place in torch.randperm(len(own))] if worker else own)


def lengthen(_: int) -> None:
    """As torch's documents have a worker choose its part."""
    get_worker_info().dataset.length = 29


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


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_with_other_ranks_and_batches(ranks2: RankPool, ranks4: RankPool, workers: int) -> None:
    def begin() -> tuple[Batches, dict[str, Any]]:
        loader = hvd.shard(DataLoader(range(50), batch_size=4, shuffle=True, **with_workers(workers)), tail="exact")
        epoch_of(loader)
        assert loader.state_dict()["epoch"] == 1
        batches = iter(loader)
        read = [next(batches).tolist() for _ in range(3)]
        return read, loader.state_dict()

    def go_on(state: dict[str, Any]) -> list[Batches]:
        loader = hvd.shard(DataLoader(range(50), batch_size=3, shuffle=True, **with_workers(workers)), tail="exact")
        loader.load_state_dict(state)
        assert loader.epoch == 1
        loader.set_epoch(1)  # as a script does that counts epochs itself
        rest = epoch_of(loader)
        assert loader.epoch == 2
        return [rest, epoch_of(loader)]

    begun = ranks2.run(begin)
    state = begun[0][1]
    assert (state["epoch"], state["done"], state["length"]) == (1, 24, 50)
    assert begun[1][1] == state
    rest, next_epoch = zip(*ranks4.run(go_on, state), strict=True)
    assert read_in([*(batches for batches, _ in begun), *rest]) == Counter(range(50))
    assert sorted(whole_order(list(next_epoch))) == list(range(50))


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


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "distributed sampler": (
        lambda: DataLoader(range(4), sampler=DistributedSampler(range(4), num_replicas=2, rank=0)),
        "shard: the loader has a DistributedSampler, which gives each rank its part already",
    ),
    "inside a batch sampler": (
        lambda: DataLoader(
            range(4), batch_sampler=BatchSampler(DistributedSampler(range(4), num_replicas=2, rank=0), 2, False)
        ),
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
    wrong: Any = "even"
    with pytest.raises(hvd.UsageError, match="tail='even'"):
        hvd.shard(DataLoader(range(4)), tail=wrong)
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
    "order": (
        lambda: DataLoader(range(4), sampler=Unseeded()),
        r"their order; let it draw in its __iter__",
    ),
    "sampler": (
        lambda: DataLoader(range(4), shuffle=hvd.rank() == 0),
        r"their sampler \(RandomSampler and SequentialSampler\); make the loader alike",
    ),
    "split": (
        lambda: DataLoader(Subset(Subset(range(9), [hvd.rank(), 2, 5, 8]), [0, 1]), shuffle=True),
        "their samples; draw splits and weights by one seed on all ranks",
    ),
    "subset": (lambda: DataLoader(range(9), sampler=SubsetRandomSampler([hvd.rank(), 8])), "their samples; draw"),
    "weights": (
        lambda: DataLoader(range(2), sampler=WeightedRandomSampler([1.0, 2.0 + hvd.rank()], 2)),
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
