"""How jobs under mpirun end; these start jobs of their own."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent / "ending_rank.py"
DEADLINE_S = 60


def run(command: list[str], how: str, *more: str) -> subprocess.CompletedProcess[str]:
    folders = [SCRIPT.parent, SCRIPT.parent.parent, SCRIPT.parent.parent / "native"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [*command, sys.executable, str(SCRIPT), how, *more]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.mark.parametrize("how", ["finalize", "leave"])
def test_a_job_ends_well_whatever_the_order_of_ends(mpirun: list[str], how: str) -> None:
    done = run(mpirun, how)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank \d done", done.stdout)) == ["rank 0 done", "rank 1 done"], done.stderr


def test_the_death_of_a_rank_ends_the_job(mpirun: list[str]) -> None:
    done = run(mpirun, "die")
    assert done.returncode != 0
    assert "done" not in done.stdout


def test_surviving_ranks_name_the_rank_that_died(mpirun: list[str], tmp_path: Path) -> None:
    """
    Open MPI's mpirun kills the survivors at once; that of the MPICH family can be told not to.

    MPICH 5 kills them all the same, some milliseconds later, by their process group: here they have one of their own,
    and tell by a socket that mpirun does not have to carry.
    """
    help_text = subprocess.run([mpirun[0], "--help"], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if "disable-auto-cleanup" not in help_text.stdout + help_text.stderr:
        pytest.skip("this mpirun kills all ranks when one dies")
    ear = tmp_path / "ear"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(ear))
        listener.settimeout(DEADLINE_S)
        done = run([*mpirun, "-disable-auto-cleanup", "setsid", "--wait"], "die", str(ear))
        assert done.returncode != 0
        told = listener.recv(1 << 16).decode()
    assert "rank 1" in told
    assert "is gone" in told
