"""What operations without a record in the log mean for those that have one."""

from __future__ import annotations

import threading

import numpy as np
from ranks import Group, Rank, wait_for

from horo.core import context

SUM = context.REDUCE_OPS["sum"]
ALONE = {"sleeps_under_contention": False, "spin_us": 5000}
"""Also on a busy machine ranks wait for one another without the leader's help, which is what is meant here."""


def run(rank: Rank, name: str, array: np.ndarray) -> None:
    rank.run("allreduce", name, [array], reduce_op=SUM)


def test_a_name_in_use_keeps_its_id_while_others_come_and_go() -> None:
    """There are two places for names. One name is used all the time, and each of the others once."""
    steps = 400

    def body(rank: Rank) -> int:
        for name in ("used", "idle"):
            rank.allreduce(np.ones(1, np.float32), name)
        hits = 0
        for step in range(steps):
            rank.allreduce(np.ones(1, np.float32), f"newcomer {step}")
            before = rank.context.counters()["cache_hits"]
            run(rank, "used", np.ones(1, np.float32))
            hits += rank.context.counters()["cache_hits"] - before
        return hits

    with Group((2,), cache_capacity=2, **ALONE) as group:
        assert group.run(body) == [steps, steps]


def test_what_comes_up_during_an_operation_that_is_alone_becomes_one_batch() -> None:
    """Where that operation is over before all of it has come up, nothing can be said."""
    large, count, wanted = 1 << 22, 12, 5

    def body(rank: Rank) -> tuple[int, bool]:
        arrays = [np.ones(1, np.float32) for _ in range(count)]
        vector = np.zeros(large, np.float32)
        run(rank, "large", vector)
        for i, array in enumerate(arrays):
            rank.allreduce(array, f"small {i}")
        counters = rank.context.counters
        before = counters()
        thread = threading.Thread(target=run, args=(rank, "large", vector))
        thread.start()
        wait_for(lambda: counters()["requests"] > before["requests"])
        handles = []
        for i, array in enumerate(arrays):
            handles.append(rank.submit("allreduce", f"small {i}", [array], reduce_op=SUM))
            wait_for(lambda announced=i + 2: counters()["cache_hits"] - before["cache_hits"] >= announced)
        runs = thread.is_alive()
        thread.join()
        rank.finish(*handles)
        return counters()["batches"] - before["batches"], runs

    batches: list[list[int]] = []
    for _ in range(40):
        with Group((2,), **ALONE) as group:
            counts, all_run = zip(*group.run(body), strict=True)
        batches += [list(counts)] if all(all_run) else []
        if len(batches) == wanted:
            break
    assert 2 * batches.count([2, 2]) >= len(batches)
