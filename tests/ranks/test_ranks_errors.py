"""Ranks that disagree get a sentence that names both and both values, and the job goes on."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jobs import wait_until
from rank_pool import RankPool, on

import horo.torch as hvd
from horo.errors import AbortedError, DeadlockError, MismatchError
from horo.torch.engine import runtime

DISAGREEMENTS: dict[str, tuple[Callable[[int], Any], str, str]] = {
    "shape": (lambda r: hvd.allreduce(torch.ones(2, 2 + r), name="x"), "float32 [2, 2]", "float32 [2, 3]"),
    "dtype": (
        lambda r: hvd.allreduce(torch.ones(2, dtype=[torch.float32, torch.int32][r]), name="x"),
        "float32 [2]",
        "int32 [2]",
    ),
    "reduction": (lambda r: hvd.allreduce(torch.ones(2), op=[hvd.Sum, hvd.Max][r], name="x"), "Sum", "Max"),
    "root": (lambda r: hvd.broadcast(torch.ones(2), r, name="x"), "root rank 0", "root rank 1"),
    "prescale": (lambda r: hvd.allreduce(torch.ones(2), prescale_factor=1.0 + r, name="x"), "factor 1", "factor 2"),
    "postscale": (lambda r: hvd.allreduce(torch.ones(2), postscale_factor=1.0 + r, name="x"), "factor 1", "factor 2"),
    "columns": (lambda r: hvd.allgather(torch.ones(1 + r, 2 + r), name="x"), "float32 [*, 2]", "float32 [*, 3]"),
    "dimensions": (lambda r: hvd.allgather(torch.ones((2,) * (1 + r)), name="x"), "float32 [*]", "float32 [*, 2]"),
    "dtypes of equal size": (
        lambda r: hvd.broadcast(torch.ones(2, dtype=[torch.complex64, torch.float64][r]), 0, name="x"),
        "complex64 [2]",
        "float64 [2]",
    ),
    "compression": (
        lambda r: hvd.allreduce(torch.ones(3), compression=[hvd.Compression.none, hvd.Compression.bf16][r], name="x"),
        "sent float32 [3], rank 1",
        "sent float32 [3] as bfloat16",
    ),
    "group": (lambda r: hvd.grouped_allreduce([torch.ones(2)] * (2 + r), name="x"), "2 tensors", "3 tensors"),
    "member": (
        lambda r: hvd.grouped_allreduce([torch.ones(2), torch.ones(3 + r)], name="x"),
        "tensor 1 of the group: rank 0",
        "float32 [4]",
    ),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_disagreement_names_both_ranks_and_values_and_the_job_goes_on(ranks2: RankPool, what: str) -> None:
    def check(call: Callable[[int], Any]) -> list[str]:
        texts = []
        for _ in range(2):  # the name can be used again, wrongly and rightly
            with pytest.raises(MismatchError) as caught:
                call(hvd.rank())
            assert isinstance(caught.value, hvd.HorovodInternalError)
            texts.append(str(caught.value))
            assert hvd.allreduce(torch.ones(2), name="x", op=hvd.Sum).tolist() == [2.0, 2.0]
        return texts

    call, first, second = DISAGREEMENTS[what]
    for texts in ranks2.run(check, call):
        for text in texts:
            assert re.search(r"\.x': .*rank 0 \(.+\).*rank 1 \(.+\)", text)
            assert first in text
            assert second in text


@on("ranks2")
def test_a_name_is_taken_until_its_handle_is_synchronized_polled_or_gone() -> None:
    refused = pytest.raises(ValueError, match=r"'allreduce\.taken': a tensor of this name is being processed")
    for free in ("synchronize", "poll", "garbage"):
        tensor = torch.ones(3)
        handle = hvd.allreduce_async_(tensor, name="taken", op=hvd.Sum)
        hvd.barrier()  # it is done on all ranks: requests of a rank are done in their order
        del tensor
        kept = [handle]
        assert isinstance(handle, int)
        assert handle > 0
        with refused:
            hvd.allreduce_async(torch.ones(3), name="taken")
        with refused:
            hvd.allreduce(torch.ones(3), name="taken")
        del handle
        with refused:
            hvd.allreduce(torch.ones(3), name="taken")
        if free == "poll":
            wait_until(functools.partial(hvd.poll, kept[0]), "the operation is done", deadline_s=60)
        if free == "synchronize":
            assert hvd.synchronize(kept[0]).tolist() == [2.0] * 3
        if free == "garbage":
            kept.clear()
        assert hvd.allreduce(torch.ones(1), name="taken").tolist() == [1.0]
        assert hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="taken")).tolist() == [1.0]
        hvd.barrier()


@pytest.mark.parametrize("by_thread", [False, True])
def test_ranks_that_wait_for_a_call_that_was_refused_for_its_name_are_told(by_thread: bool) -> None:
    def check(by_thread: bool) -> str:
        hvd.init()
        thread = threading.Thread(target=_fail)
        if hvd.rank() == 0 and by_thread:
            thread.start()
            wait_until(lambda: runtime.current().core.counters()["requests"], "its name is taken", deadline_s=60)
        elif not by_thread:
            handle = hvd.allreduce_async(torch.ones(3), name="twice", op=hvd.Sum)
        if hvd.rank() == 0:
            with pytest.raises(ValueError, match="is being processed already"):
                hvd.allreduce(torch.ones(3), name="twice")
        elif not by_thread:
            hvd.synchronize(handle)
        name = "other" if hvd.rank() == 0 else "later" if by_thread else "twice"
        with pytest.raises(DeadlockError) as error:
            hvd.allreduce(torch.ones(3), name=name)
        if thread.ident is not None:
            thread.join()
        return str(error.value)

    with RankPool(2, init=False, environment={"HORO_DEADLOCK_TIME_SECONDS": "0.5"}) as pool:
        for told in pool.run(check, by_thread):
            assert re.search(r"\(\S+:\d+; a second 'allreduce\.twice' was refused before\)", told), told
            assert re.search(r"rank 1 for 'allreduce\.\w+' \(\S+:\d+\)", told), told


def _fail() -> None:
    with pytest.raises((DeadlockError, AbortedError)):
        hvd.allreduce(torch.ones(3), name="twice")


@on("ranks2")
def test_an_old_handle_does_not_free_the_name_of_a_later_operation() -> None:
    first = hvd.allreduce_async(torch.ones(1), name="again", op=hvd.Sum)
    wait_until(lambda: hvd.poll(first), "the first is done", deadline_s=60)
    second = hvd.allreduce_async(torch.ones(1), name="again", op=hvd.Sum)
    assert hvd.synchronize(first).tolist() == [2.0]
    with pytest.raises(ValueError, match=r"'allreduce\.again': a tensor of this name"):
        hvd.allreduce(torch.ones(1), name="again")
    assert hvd.synchronize(second).tolist() == [2.0]
