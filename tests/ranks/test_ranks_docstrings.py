"""What ``help()`` shows of a public function stands by itself: arguments, errors, and an example that runs."""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from small_model import make_model

import horo.torch as hvd

FUNCTIONS = [name for name in hvd.__all__ if inspect.isfunction(getattr(hvd, name))]
EXAMPLES = [name for name in hvd.__all__ if "Example:\n" in (inspect.getdoc(getattr(hvd, name)) or "")]
CONSTANT = {name for name in FUNCTIONS if re.search(r"_(built|enabled)$", name)}
"""They take nothing, raise nothing and say yes or no, or a version."""


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - CONSTANT))
def test_a_function_says_what_it_takes_raises_and_when_it_returns(name: str) -> None:
    said = inspect.getdoc(getattr(hvd, name)) or ""
    arguments = inspect.signature(getattr(hvd, name)).parameters
    if arguments:
        assert "Args:\n" in said
    missing = [argument for argument in arguments if not re.search(rf"^ +(\w+, )*{argument}[:,]", said, re.MULTILINE)]
    assert not missing
    assert "Raises:\n" in said or "raises nothing" in said
    assert re.search(r"\bblocks?\b|returns? at once", said, re.IGNORECASE)
    assert name in EXAMPLES


@pytest.fixture(params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param) as pool:
        yield pool


def test_examples_run_on_one_rank_and_on_two(ranks: RankPool) -> None:
    def check(examples: dict[str, str]) -> None:
        for name, code in examples.items():
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            known: dict[str, Any] = {"hvd": hvd, "torch": torch, "os": os, "model": model, "optimizer": optimizer}
            exec(compile(code, f"<example of {name}>", "exec"), known)
            hvd.init()
        torch.set_num_threads(1)

    codes = {}
    for name in EXAMPLES:
        rest = (inspect.getdoc(getattr(hvd, name)) or "").split("Example:\n")[1]
        codes[name] = textwrap.dedent(rest)
    ranks.run(check, codes)
