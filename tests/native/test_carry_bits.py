"""On two hosts the bits of an allreduce do not depend on how its data has travelled, which depends on timing."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from ranks import Group, Rank, wait_for

from horo.core import context

COUNT = 300
SCALED = {"prescale": 0.3, "postscale": 0.7}


class Paths:
    """The same allreduce of all ranks, by each path in turn; rank 0 leads the agreement."""

    def __init__(self, group: Group, hosts: list[int], inputs: list[np.ndarray], options: dict[str, Any]) -> None:
        self._group = group
        self._roots, self._others = range(hosts[0]), range(hosts[0], sum(hosts))
        self._inputs = inputs
        self._options = options
        self._together = threading.Barrier(len(inputs))

    def _messages(self, leader: int) -> int:
        return self._group.contexts[leader].counters()["messages_sent"]

    def _meet(self, leader: int) -> int:
        """All ranks meet here; returns how many messages the leader has sent until then."""
        self._together.wait()
        before = self._messages(leader)
        self._together.wait()
        return before

    def _reduce(self, rank: Rank, names: list[str]) -> bytes:
        arrays = [self._inputs[rank.rank].copy() for _ in names]
        handles = [
            rank.submit("allreduce", name, [array], **self._options) for name, array in zip(names, arrays, strict=True)
        ]
        rank.finish(*handles)
        return arrays[-1].tobytes()

    def by_batch(self, rank: Rank) -> bytes:
        """Two at once are not carried."""
        return self._reduce(rank, ["y", "x"])

    def by_record(self, rank: Rank) -> bytes:
        """The other host's data is at the root before that of all of its own ranks."""
        before = self._meet(self._others[0])
        if rank.rank == self._roots[-1]:
            wait_for(lambda: self._messages(self._others[0]) > before)
        return self._reduce(rank, ["x"])


def check_paths(hosts: list[int], inputs: list[np.ndarray], wanted: dict[str, Any]) -> None:
    """An allreduce of ``inputs``, one of each rank, has the same bits on all ranks and by all paths."""
    with Group(hosts, cache_capacity=8) as group:
        paths = Paths(group, hosts, inputs, wanted)

        def body(rank: Rank) -> list[bytes]:
            for name in ("x", "y"):
                rank.finish(rank.submit("allreduce", name, [inputs[rank.rank].copy()], **wanted))
            rank.barrier()
            return [paths.by_batch(rank), paths.by_record(rank)]

        results = group.run(body)
    assert {bits for result in results for bits in result} == {results[0][0]}


@pytest.mark.parametrize("hosts", [[1, 1], [2, 2], [3, 1], [1, 2]], ids=str)
@pytest.mark.parametrize(
    ("op", "options"), [("average", {}), ("sum", SCALED), ("product", {})], ids=["average", "scaled sum", "product"]
)
@pytest.mark.parametrize("spread", [1, 1e-5], ids=str)
@pytest.mark.parametrize("form", [("float16", None), ("float32", "bfloat16"), ("float32", None)], ids=str)
def test_the_bits_do_not_depend_on_the_path(
    hosts: list[int], op: str, options: dict[str, float], spread: float, form: tuple[str, str | None]
) -> None:
    dtype, wire = form
    random = np.random.default_rng(7)
    inputs = [(random.standard_normal(COUNT) * spread).astype(dtype) for _ in range(sum(hosts))]
    check_paths(hosts, inputs, {"wires": [wire], "reduce_op": context.REDUCE_OPS[op], **options})
