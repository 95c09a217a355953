"""Fixtures for real jobs."""

import pytest


@pytest.fixture(params=["localhost:8", "one:2,two:2"], ids=["direct", "agents"])
def where(request: pytest.FixtureRequest) -> str:
    """Hosts for up to four ranks: this one, or two behind agents."""
    return str(request.param)
