"""``Trainer(strategy="horo")`` and ``Fabric(strategy="horo")`` on two ranks, which ``lightning_cases`` describes."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from rank_pool import RankError, RankPool

CASES = [
    (module, name)
    for module in ("lightning_cases", "lightning_loggers")
    for name in re.findall(r"^def (case_\w+)", Path(__file__).with_name(f"{module}.py").read_text(), re.MULTILINE)
]
IMPORTS_S = 240.0
"""A deadline for the import of Lightning in both ranks on a machine that does other things, too."""

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("lightning_utilities", "pytorch_lightning")),
    reason="lightning and pytorch-lightning are not installed",
)


def _run_case(module: str, name: str, folder: Path) -> None:
    getattr(import_module(module), name)(folder)


def _lose_rank(number: int) -> str:
    said: str = import_module("lightning_cases").lose_rank(number)
    return said


def test_on_two_ranks(tmp_path: Path) -> None:
    """All cases, in ranks that import Lightning once: that takes longer than the cases."""
    failures = []
    with RankPool(2) as pool:
        for module, name in CASES:
            folder = tmp_path / name
            folder.mkdir()
            try:
                pool.run(_run_case, module, name, folder, deadline_s=IMPORTS_S)
            except RankError as error:
                failures.append(f"{name}\n{error}")
        assert not failures, "\n".join(failures)
        assert "PeerLostError: rank 1 " in pool.run_each(_lose_rank, [(1,)] * 2, deadline_s=IMPORTS_S, lost=[1])[0]
