"""Every sample of an epoch enters a committed step exactly once, whoever dies or comes, and wherever."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horo.elastic.shares import TAILS, Share, Tail, deal, shuffled

sizes = st.integers(0, 60)
counts = st.integers(1, 9)
tails = st.sampled_from(TAILS)


def test_the_order_is_horovods() -> None:
    expected = list(range(10))
    random.Random(3 + 4).shuffle(expected)
    assert shuffled(10, 3 + 4) == expected


@given(remaining=sizes, replicas=counts)
def test_pad_is_horovods_where_that_has_an_answer(remaining: int, replicas: int) -> None:
    share = Share(remaining, replicas, "pad")
    rounds = -(-remaining // replicas)
    padded = list(range(remaining))
    padded += padded[: rounds * replicas - remaining]
    for rank in range(replicas):
        own = share.positions(rank)
        assert len(own) == rounds
        if len(padded) == rounds * replicas:  # else Horovod's assertion fails
            assert own == padded[rank::replicas]


@given(remaining=sizes, replicas=counts, batch=counts, tail=tails)
def test_all_ranks_have_equally_many_batches(remaining: int, replicas: int, batch: int, tail: Tail) -> None:
    share = Share(remaining, replicas, tail, batch)
    assert len({-(-len(share.positions(rank)) // batch) for rank in range(replicas)}) == 1


@given(length=sizes, replicas=counts, tail=tails, kept=st.sampled_from([None, 1]))
def test_an_order_is_dealt_out_in_rounds(length: int, replicas: int, tail: Tail, kept: int | None) -> None:
    dealt = [list(deal(iter(range(length)), rank, replicas, tail, kept)) for rank in range(replicas)]
    assert [len(own) for own in dealt] == [Share(length, replicas, tail).count(rank) for rank in range(replicas)]
    rounds = [item for items in itertools.zip_longest(*dealt) for item in items if item is not None]
    left_out = length % replicas if tail == "drop" else 0
    assert rounds[:length] == list(range(length - left_out))
    again = len(rounds) - (length - left_out)
    assert rounds[length - left_out :] == [place % min(length, kept or length) for place in range(again)]
    assert again == (-length % replicas if tail == "pad" else 0)


def test_an_order_without_end_is_dealt_out_as_it_comes() -> None:
    assert list(itertools.islice(deal(itertools.count(), 2, 3, "drop"), 3)) == [2, 5, 8]


@given(remaining=sizes, replicas=counts, batch=counts)
def test_exact_has_each_sample_once_with_its_weight(remaining: int, replicas: int, batch: int) -> None:
    share = Share(remaining, replicas, "exact", batch)
    owned = [share.positions(rank) for rank in range(replicas)]
    seen: Counter[int] = Counter()
    for taken in range(0, max(map(len, owned)), batch):
        parts = [own[taken : taken + batch] for own in owned]
        weights = [share.weight(rank, taken) for rank in range(replicas)]
        new = [set(part) if weight else set() for part, weight in zip(parts, weights, strict=True)]
        assert sum(map(len, new)) == share.done(taken + batch) - share.done(taken)
        # The mean over ranks of weight * mean of a rank is the mean of all samples.
        total = sum(weight * sum(part) / len(part) for part, weight in zip(parts, weights, strict=True)) / replicas
        everyone = [sample for part in new for sample in part]
        assert total == pytest.approx(sum(everyone) / len(everyone))
        seen.update(everyone)
    assert seen == Counter(range(remaining))


# ---- Deaths and arrivals anywhere ----


@dataclass
class Model:
    """A rank's model, and the copy of it at its last commit: the samples of each epoch that have entered it."""

    seen: dict[int, Counter[int]] = field(default_factory=dict)
    epoch: int = 0
    processed: int = 0
    commit: int = 0

    def copy(self) -> Model:
        return Model(
            {epoch: Counter(seen) for epoch, seen in self.seen.items()}, self.epoch, self.processed, self.commit
        )


LINES = ("forward", "reduced", "stepped", "recorded", "committed")


class Job:
    """Ranks in lock step. A death leaves the others one line apart, and one commit at most."""

    def __init__(self, data: st.DataObject, length: int, epochs: int, tail: Tail) -> None:
        self.data, self.length, self.epochs, self.tail = data, length, epochs, tail
        self.batch = cast("int", data.draw(st.integers(1, 4), "batch"))
        self.every = cast("int", data.draw(st.integers(1, 3), "commit every"))
        self.deaths = cast("int", data.draw(st.integers(0, 5), "deaths"))
        self.models = [Model() for _ in range(data.draw(st.integers(1, 5), "ranks"))]
        self.commits = [model.copy() for model in self.models]
        self.repeats = 0

    def run(self) -> Model:
        while self.generation():
            size = self.data.draw(st.integers(1, 5), "next size")
            survivors = sorted(self.commits, key=lambda model: -model.commit)
            assert survivors[0].commit - survivors[-1].commit <= 1
            self.commits = [survivors[0].copy() for _ in range(size)]
            self.models = [model.copy() for model in self.commits]
        return self.models[0]

    def generation(self) -> bool:
        """Trains until the end, or until a rank dies."""
        ranks = len(self.models)
        while self.models[0].epoch < self.epochs:
            epoch, begin = self.models[0].epoch, self.models[0].processed
            order = shuffled(self.length, epoch)[begin:]
            share = Share(len(order), ranks, self.tail, self.batch)
            owned = [share.positions(rank) for rank in range(ranks)]
            for step, taken in enumerate(range(0, len(owned[0]), self.batch)):
                samples = Counter(
                    order[place]
                    for rank, own in enumerate(owned)
                    for place in own[taken : taken + self.batch]
                    if share.weight(rank, taken)
                )
                self.repeats += sum(samples.values()) - (share.done(taken + self.batch) - share.done(taken))
                done = begin + share.done(taken + self.batch)
                if self.dies(epoch, samples, done, commits=(step + 1) % self.every == 0):
                    return True
            for model in self.models:
                model.epoch, model.processed = epoch + 1, 0
        return False

    def dies(self, epoch: int, samples: Counter[int], done: int, *, commits: bool) -> bool:
        """One step; whether a rank has died in it."""
        at = len(LINES)
        if self.deaths and self.data.draw(st.booleans(), "dies here"):
            self.deaths -= 1
            at = self.data.draw(st.integers(0, len(LINES) - 1), "line")
        for rank, model in enumerate(self.models):
            # An abort is out of band: one survivor may have got the result, and gone on to its commit.
            lines = (
                at if at == len(LINES) else self.data.draw(st.sampled_from([0, len(LINES)] if at else [0]), "gets to")
            )
            if lines:
                model.seen.setdefault(epoch, Counter()).update(samples)
                model.processed = done
                if commits:
                    model.commit += 1
                    self.commits[rank] = model.copy()
        if at == len(LINES):
            return False
        alive = [rank for rank in range(len(self.models)) if rank == 0 or self.data.draw(st.booleans(), "lives")]
        self.commits = [self.commits[rank] for rank in alive]
        return True


@settings(max_examples=400)
@given(data=st.data(), length=st.integers(1, 23), tail=tails)
def test_every_sample_enters_a_committed_step_exactly_once(data: st.DataObject, length: int, tail: Tail) -> None:
    epochs = 2
    model = Job(data, length, epochs, tail).run()
    for epoch in range(epochs):
        seen = model.seen.get(epoch, Counter())
        everyone = Counter(range(length))
        if tail == "exact":
            assert seen == everyone
        elif tail == "pad":
            assert not everyone - seen
            assert sum(seen.values()) - length < 5  # ranks, of the last ones
        else:
            assert max(seen.values(), default=1) == 1
            assert length - sum(seen.values()) < 5
