"""Signals that are blocked or ignored where hororun is started, as by some batch systems: a mask survives exec."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from jobs import Flags, Hororun

BLOCKED = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.execv(sys.argv[1], sys.argv[1:])
"""
PREFIX = [sys.executable, "-S", "-c", BLOCKED]
WHO = "grep -E '^Sig(Blk|Ign)' /proc/self/status"


def mask(lines: str, name: str) -> int:
    """A line of /proc/self/status, of the only rank."""
    (found,) = [line for line in lines.splitlines() if name in line]
    return int(found.split()[-1], 16)


def check(lines: str) -> None:
    assert mask(lines, "SigBlk") == 0
    assert not mask(lines, "SigIgn") & (1 << signal.SIGCHLD - 1)


@pytest.fixture
def mpirun(tmp_path: Path) -> str:
    """Says it is Open MPI 4, and runs what stands behind ``--``."""
    path = tmp_path / "mpirun"
    path.write_text('#!/bin/sh\ntest "$1" = --version && exec echo "mpirun (Open MPI) 4.1.4"\n'
                    'while test "$1" != sh; do shift; done\nexec "$@"\n')  # fmt: skip
    path.chmod(0o755)
    return str(path)


WAYS = ["direct", "agents", "mpirun"]


def words_of(way: str, hororun: Hororun, mpirun: str) -> tuple[list[str], str]:
    if way == "mpirun":
        hororun.remote_shell = ""
        return ["--mpi", "--mpirun", mpirun], "localhost:1"
    return [], "localhost:1" if way == "direct" else "one:1"


@pytest.mark.parametrize("way", WAYS)
def test_a_job_ends_and_its_ranks_start_with_plain_signals(hororun: Hororun, mpirun: str, way: str) -> None:
    words, where = words_of(way, hororun, mpirun)
    done = hororun.run("-np", "1", *words, "--", "sh", "-c", WHO, where=where, prefix=PREFIX)
    assert (done.returncode, done.stderr) == (0, "")
    check(done.stdout)


@pytest.mark.parametrize("way", WAYS)
def test_a_signal_that_was_blocked_ends_the_job(hororun: Hororun, mpirun: str, way: str, flags: Flags) -> None:
    words, where = words_of(way, hororun, mpirun)
    script = f": > {flags.folder}/up; exec sleep 300"
    job = hororun.start("-np", "1", *words, "--", "sh", "-c", script, where=where, prefix=PREFIX)
    flags.wait(["up"])
    job.process.terminate()
    assert job.finish().returncode == 143
