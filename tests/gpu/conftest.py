"""Tests on real devices; where there is none, they are skipped with the reason."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """The first device of this process."""
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no GPU; `pytest tests/gpu` on a machine with one runs this")
    return torch.device("cuda", 0)
