"""What torch's profiler shows of horo."""

from __future__ import annotations

from typing import Any

import torch
from rank_pool import RankPool, one_of
from small_model import assert_close, gradients_of, make_loss, make_model, mean_gradients, sgd

import horo.torch as hvd

ranks2 = one_of("ranks2_always", "ranks2_never", "ranks2_step", "ranks2_step_never")
"""Two ranks in each order of calls, which reduce gradients during backward or after it."""


def test_a_training_step_is_shown_with_the_names_of_its_gradients(ranks2: RankPool) -> None:
    def check() -> None:
        model = make_model()
        optimizer: Any = sgd(model)
        for step in range(2):  # the first reduction compares parameters, the second repeats requests
            wanted = mean_gradients(model, hvd.size(), step)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                make_loss(model, hvd.rank(), step).backward()
                optimizer.step()
            assert_close(gradients_of(model), wanted)
            optimizer.zero_grad()
            found = [event.key for event in profile.key_averages() if event.key.startswith("horo.")]
            for name, parameter in model.named_parameters():
                kind = optimizer._reducer.states[parameter].kind
                assert f"horo.allreduce {kind}.{name}" in found, found
            assert "horo.synchronize" in found, found

    ranks2.run(check)


def test_each_operation_is_shown(ranks2: RankPool) -> None:
    def check() -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(2):
                hvd.allreduce(torch.ones(3), name="shown")
                hvd.broadcast_(torch.ones(3), 0, name="shown")
                hvd.synchronize(hvd.allreduce_async(torch.ones(3), name="shown.async"))
                hvd.allgather(torch.ones(3), name="shown")
                hvd.barrier()
        counts = {event.key: event.count for event in profile.key_averages()}
        for name in (
            "allreduce allreduce.shown",
            "broadcast broadcast.shown",
            "allreduce allreduce.shown.async",
            "synchronize allreduce.shown.async",
            "allgather allgather.shown",
        ):
            assert counts[f"horo.{name}"] == 2, counts
        assert sum(count for key, count in counts.items() if key.startswith("horo.barrier ")) == 2
        hvd.allreduce(torch.ones(3), name="shown")

    ranks2.run(check)
