"""``Trainer(strategy="horo")`` and ``Fabric(strategy="horo")`` on two ranks, which ``lightning_cases`` describes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from rank_pool import RankPool

CASES = re.findall(r"^def case_(\w+)", Path(__file__).with_name("lightning_cases.py").read_text(), re.MULTILINE)
IMPORTS_S = 240.0
"""A deadline for the import of Lightning in both ranks on a machine that does other things, too."""

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("lightning_utilities", "pytorch_lightning")),
    reason="lightning and pytorch-lightning are not installed",
)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def _run_case(name: str, folder: Path) -> None:
    import lightning_cases  # noqa: PLC0415  (in ranks only)

    getattr(lightning_cases, f"case_{name}")(folder)


@pytest.mark.parametrize("name", CASES)
def test_on_two_ranks(pool: RankPool, tmp_path: Path, name: str) -> None:
    pool.run(_run_case, name, tmp_path, deadline_s=IMPORTS_S)
