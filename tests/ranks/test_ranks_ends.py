"""What other ranks are told of a rank that has come to its end, and what is left of horo in the interpreter then."""

from __future__ import annotations

import logging
import re
import sys
import threading
from typing import Any

import pytest
import torch
from rank_pool import RankPool, on
from small_model import made, make_loss, make_model, sgd, take_step

import horo.torch as hvd
from horo.errors import AbortedError, PeerLostError
from horo.torch.lifecycle import _at_exit


@pytest.mark.parametrize("end", ["script", "shutdown"])
def test_a_rank_that_runs_out_of_data_is_named_with_the_steps_of_both(fresh2: RankPool, end: str) -> None:
    def check() -> str:
        hvd.init()
        model, optimizer = made()
        for _ in range(2):
            take_step(model, optimizer)
            optimizer.zero_grad()
        text = ""
        if hvd.rank() == 0:
            with pytest.raises(AbortedError) as caught:
                make_loss(model, 0).backward()
                optimizer.step()
            text = str(caught.value)
        if end == "script":
            _at_exit()
        else:
            hvd.shutdown()
        return text

    done = {"script": "came to the end of its script", "shutdown": "has shut horo down"}[end]
    told = "uneven data or an early stop; use drop_last, DistributedSampler or hvd.join()"
    pattern = rf"rank 1 \(.*\) {done} after 2 steps, while rank 0 is in step 3: {re.escape(told)}"
    assert re.match(pattern, fresh2.run(check)[0])


def test_training_whose_gradients_nothing_averages_is_told_of_at_the_end(fresh2: RankPool) -> None:
    """Only where a program has made the models equal, and then trained them each for itself by oversight."""

    def check() -> dict[str, list[str]]:
        told: dict[str, list[str]] = {}

        def train(case: str, *, begins_equal: bool = True, steps: int = 3, is_wrapped: bool = False) -> None:
            hvd.init()
            model = make_model()
            optimizer: Any = sgd(model) if is_wrapped else torch.optim.SGD(model.parameters(), lr=0.1)
            if begins_equal:
                hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            for _ in range(steps):
                make_loss(model, hvd.rank()).backward()
                if case == "averages itself":
                    hvd.allreduce(next(model.parameters()).grad)
                optimizer.step()
            records: list[str] = []
            handler = logging.Handler()
            handler.emit = lambda record: records.append(record.getMessage())
            logging.getLogger("horo").addHandler(handler)
            hvd.shutdown()
            logging.getLogger("horo").removeHandler(handler)
            told[case] = records

        train("forgotten")
        train("averages itself")
        train("begins apart", begins_equal=False)
        train("evaluates", steps=0)
        train("wrapped", is_wrapped=True)
        return told

    told, others = fresh2.run(check)
    (warning,) = told.pop("forgotten")
    assert warning.startswith("optimizer.step() was called 3 times, and nothing was averaged between the 2 ranks")
    assert "optimizer = hvd.DistributedOptimizer(optimizer, " in warning
    assert not any(told.values())
    assert not any(others.values())


@on("fresh2")
def test_what_horo_has_put_into_the_interpreter_is_taken_out_by_shutdown() -> None:
    def now() -> list[Any]:
        return [sys.excepthook, sys.exit, threading.excepthook, *sys.meta_path]

    before = now()
    for _ in range(2):
        hvd.init()
        assert now()[:3] != before[:3]
        hvd.shutdown()
        assert now() == before


def test_the_exception_that_has_ended_a_thread_is_told_when_its_rank_comes_to_its_end(fresh2: RankPool) -> None:
    def check() -> str:
        hvd.init()

        def work() -> None:
            hvd.barrier()
            raise ValueError("bad sample")

        if hvd.rank() == 0:
            hvd.barrier()
            with pytest.raises(PeerLostError) as caught:
                hvd.barrier()
            hvd.shutdown()
            return str(caught.value)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        _at_exit()
        return ""

    told = fresh2.run(check)[0]
    assert re.match(r"rank 1 \(.*\) ended with ValueError: bad sample \(in a thread\)", told)
