"""Autotuning in jobs of real processes: its variables, its log, and a training in the midst of it."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankError, RankPool
from small_model import made, take_step

import horo.torch as hvd
from horo.torch.engine import runtime

SEARCH = {
    "HORO_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "20", "HORO_OVERLAP": "always",
}  # fmt: skip


def train(steps: int, watch: Callable[[], Any] = hvd.config) -> tuple[list[torch.Tensor], list[Any], bool]:
    """After each step the parameters, before it what ``watch`` finds; and whether the search is over."""
    model, optimizer = made()
    after, seen = [], []
    for step in range(steps):
        seen.append(watch())
        optimizer.zero_grad()
        take_step(model, optimizer, step % 7)
        after.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    return after, seen, runtime.current().job.context.tuning()[1]


def test_a_job_searches_once_optimizers_step_and_again_when_it_begins_again(tmp_path: Path) -> None:
    log = tmp_path / "autotune.csv"

    def twice() -> list[bool]:
        context = runtime.current().job.context
        first = context.tuning()
        for _ in range(60):
            hvd.allreduce(torch.ones(20_000), name="no step")
        assert context.tuning() == first
        over = [train(400)[2]]
        hvd.shutdown()
        hvd.init()
        assert not runtime.current().job.context.tuning()[1]
        over.append(train(400)[2])
        return over

    with RankPool(2, environment={**SEARCH, "HORO_AUTOTUNE_LOG": str(log)}) as pool:
        assert pool.run(twice) == [[True, True]] * 2
    assert [row["stage"] for row in csv.DictReader(log.open())].count("best") == 1


def test_all_ranks_search_alike_and_config_shows_what_is_in_force(tmp_path: Path) -> None:
    log = tmp_path / "autotune.csv"

    def watch() -> tuple[list[tuple[Any, str]], list[Any]]:
        settings, knobs = hvd.config(), runtime.current().job.context.tuning()[0]
        shown = [(settings[name], settings.source(name)) for name in ("segment_bytes", "overlap", "spin_us")]
        return shown, [knobs["segment"], knobs["overlap"]]

    def search() -> tuple[list[torch.Tensor], list[Any], bool]:
        told = train(400, watch)
        hvd.init(segment_bytes=256 << 10)  # as it was set: no change
        return told

    with RankPool(2, environment={**SEARCH, "HOROVOD_AUTOTUNE_LOG": str(log)}) as pool:
        (first, *one), (second, *other) = pool.run(search)
    assert all(torch.equal(*each) for each in zip(first, second, strict=True))
    for seen, is_over in (one, other):
        assert is_over
        assert seen[0][0] == [(256 << 10, "default"), ("always", "HORO_OVERLAP"), (1000, "default")]
        for (segment, overlap, spin), (native_segment, native_overlap) in seen:
            is_first = native_segment == 256 << 10
            assert segment == (native_segment, "default" if is_first else "autotune")
            assert overlap == (("always", "HORO_OVERLAP") if native_overlap == 2 else ("never", "autotune"))
            assert spin == (1000, "default")
        assert {segment[1] for (segment, _, _), _ in seen} == {"default", "autotune"}
        assert {overlap[1] for (_, overlap, _), _ in seen} == {"HORO_OVERLAP", "autotune"}
    rows = list(csv.DictReader(log.open()))
    assert rows[-1]["stage"] == "best"
    assert {row["overlap"] for row in rows} == {"always", "never"}


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "autotune.csv"
    pool = RankPool(2, environment={**SEARCH, "HORO_AUTOTUNE_LOG": str(path)})
    with pytest.raises(RankError, match=r"HORO_AUTOTUNE_LOG='.*' cannot be written on rank 0: No such file"):
        pool.run(train, 1)
