"""The sampler of the recipes: each epoch has every sample, whatever the number of ranks, also when it is resumed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from document_blocks import HOW_TO, python_blocks

torch = pytest.importorskip("torch")


def samplers(count: int, size: int) -> list[Any]:
    """The sampler of each rank, whose ``hvd`` knows its rank and the size of the job alone."""
    (page,) = (page for page in HOW_TO if page.name == "recipes.md")
    (block,) = (block for block in python_blocks(page) if "class ResumableSampler" in block.code)
    code = block.code[: block.code.index("\nsampler = ")]
    made = []
    for rank in range(size):
        here = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: size)
        given: dict[str, Any] = {"torch": torch, "hvd": here}
        exec(code, given)
        made.append(given["ResumableSampler"](range(count)))
    return made


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 13])
def test_an_epoch_has_every_sample_and_as_many_for_each_rank(count: int, size: int) -> None:
    ranks = samplers(count, size)
    lists = [list(sampler) for sampler in ranks]
    assert {len(own) for own in lists} == {len(ranks[0])} == {-(-count // size)}
    taken = [sample for own in lists for sample in own]
    assert set(taken) == set(range(count))
    for sampler in ranks:
        sampler.set_epoch(1)
    if count == 13:
        assert [list(sampler) for sampler in ranks] != lists
    for sampler in ranks:
        sampler.set_epoch(0)
    assert [list(sampler) for sampler in ranks] == lists


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 3)])
@pytest.mark.parametrize("batches", [0, 2, 7])
def test_a_resumed_epoch_takes_the_rest_with_any_number_of_ranks(before: int, after: int, batches: int) -> None:
    count, batch = 13, 2
    ranks = samplers(count, before)
    ranks[0].set_epoch(3)
    for sampler in ranks[1:]:
        sampler.set_epoch(3)
    taken = [sample for sampler in ranks for sample in list(sampler)[: batches * batch]]
    for sampler in ranks:
        for _ in range(batches):
            sampler.step(batch)
    others = samplers(count, after)
    for sampler in others:
        sampler.load_state_dict(ranks[0].state_dict())
    rest = [sample for sampler in others for sample in sampler]
    assert set(taken) | set(rest) == set(range(count))
    if batches * batch * before < count:
        assert set(taken).isdisjoint(rest)
    else:
        assert rest == []
    for sampler in others:
        sampler.set_epoch(4)
    assert {sample for sampler in others for sample in sampler} == set(range(count))
