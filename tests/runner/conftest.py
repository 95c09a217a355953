"""Fixtures for real jobs."""

from pathlib import Path

import pytest


@pytest.fixture(params=["localhost:8", "one:2,two:2"], ids=["direct", "agents"])
def where(request: pytest.FixtureRequest) -> str:
    """Hosts for up to four ranks: this one, or two behind agents."""
    return str(request.param)


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A folder for PATH with an mpirun that says it is Open MPI 4 and runs what stands behind ``--``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = '#!/bin/sh\ntest "$1" = --version && { echo "mpirun (Open MPI) 4.1.4"; exit 0; }\n'
    script += f'echo "$*" > {tmp_path}/call\nwhile test "$1" != sh; do shift; done\nexec "$@"\n'
    (folder / "mpirun").write_text(script)
    (folder / "mpirun").chmod(0o755)
    return folder
