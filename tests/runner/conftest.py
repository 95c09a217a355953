"""Fixtures for real jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Flags, Hororun, make_remote_shell


@pytest.fixture
def hororun(tmp_path: Path) -> Iterator[Hororun]:
    """Starts jobs, and ends what is left of them."""
    runner = Hororun(make_remote_shell(tmp_path))
    yield runner
    runner.clean_up()


@pytest.fixture(params=["localhost:8", "one:2,two:2"], ids=["direct", "agents"])
def where(request: pytest.FixtureRequest) -> str:
    """Hosts for up to four ranks: this one, or two behind agents."""
    return str(request.param)


@pytest.fixture
def flags(tmp_path: Path) -> Flags:
    folder = tmp_path / "flags"
    folder.mkdir()
    return Flags(folder)
