"""A reader of a run learns which command makes the skipped tests run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from skips import ways_to_run

REASONS = [
    *["no cluster: ip, sshd are not installed (`apt install iproute2 openssh-server`)"] * 3,
    "no Slurm: srun is not installed (`apt install slurm-client`)",
    *["no openmpi: build/mpi/openmpi is not there (`make test-mpi` makes it)"] * 6,
    "need --with-mpi option to run",
    "making network namespaces needs root",
    "this machine has no avx512",
]


def test_each_way_is_one_line_with_the_number_of_its_tests() -> None:
    assert ways_to_run(REASONS) == [
        "    7 tests: make test-mpi",
        "    4 tests: apt install iproute2 openssh-server slurm-client",
        "    1 test:  as root, on a machine or in a container that may make network namespaces",
        "    1 test:  not on this machine, or not in this kind of run: the reasons are above",
    ]


def test_a_run_with_skipped_tests_ends_with_the_ways(tmp_path: Path) -> None:
    suite = Path(__file__).parents[1]
    (tmp_path / "conftest.py").write_text((suite / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_it(): pytest.skip('munged is not installed (`apt install munge`)')\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", f"pythonpath={suite}", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    end = done.stdout.partition("what makes skipped tests run")[2].splitlines()
    assert end[1] == "    1 test:  apt install munge"
