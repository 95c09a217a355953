"""Trainers of other projects that clip, scale and accumulate by themselves work with a distributed optimizer."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from example_runs import launcher, start

RANK = Path(__file__).with_name("trainer_rank.py")
NEEDS = {"lightning": ["lightning"], "transformers": ["transformers", "accelerate"]}


@pytest.mark.parametrize("trainer", list(NEEDS))
def test_ranks_train_as_one_process_with_whole_batches(trainer: str) -> None:
    if any(importlib.util.find_spec(package) is None for package in NEEDS[trainer]):
        pytest.skip("no such trainer here: `pip install lightning transformers accelerate`")
    done = start([*launcher("hororun", 2), str(RANK), trainer])
    found = re.findall(r"^differ by (\S+), moved by (\S+)$", done.stdout, re.MULTILINE)
    assert len(found) == 3, done.stdout
    for differ, moved in found:
        assert float(differ) < 1e-12, done.stdout
        assert float(moved) > 1e-3, done.stdout
