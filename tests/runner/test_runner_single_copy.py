"""Ranks of one host that read each other's memory, as processes; with a double of the system call on one rank."""

import errno
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from doubles import build_double
from jobs import TORCH_S, Hororun

SCRIPT = str(Path(__file__).resolve().parent.parent / "moving_rank.py")
READS = "large moves read the memory of the other ranks"
PASSES = "large moves pass shared memory"


def run(
    hororun: Hororun, *words: str, double: Path | None = None, script: tuple[str, ...] = ("4",)
) -> subprocess.CompletedProcess[str]:
    """``double``: loaded in rank 1 alone."""
    command = [sys.executable, SCRIPT, *script]
    if double is not None:
        start = f'if [ "$HOROVOD_RANK" = 1 ]; then export LD_PRELOAD={shlex.quote(str(double))}; fi; exec "$@"'
        command = ["sh", "-c", start, "sh", *command]
    environment = {"HORO_LOG_LEVEL": "info", "OMP_NUM_THREADS": "1"}
    started = hororun.start("-np", "3", "--no-prefix", *words, *command, environment=environment)
    return started.finish(TORCH_S)


def check_right(done: subprocess.CompletedProcess[str], said: str, never: str) -> None:
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all is right") == 3
    assert done.stderr.count(said) == 1, done.stderr[-3000:]
    assert never not in done.stderr


def test_ranks_read_each_other_where_they_may(hororun: Hororun) -> None:
    check_right(run(hororun), READS, PASSES)


def test_a_user_may_turn_it_off(hororun: Hororun) -> None:
    done = run(hororun, "--no-single-copy")
    assert (done.returncode, done.stdout.count("all is right")) == (0, 3), done.stderr[-3000:]
    assert "large moves" not in done.stderr


@pytest.mark.parametrize(
    ("defines", "reason"),
    [({"REFUSED": errno.EPERM}, "Operation not permitted"), ({"FORGES": 1}, "No such process")],
    ids=["forbidden", "another process"],
)
def test_where_one_may_not_none_does(hororun: Hororun, tmp_path: Path, defines: dict[str, int], reason: str) -> None:
    done = run(hororun, double=build_double("libpeer_memory.so", tmp_path, **defines))
    check_right(done, f"{PASSES}, since rank 1 cannot read the memory of rank 2: {reason}", READS)


def test_reads_may_end_early(hororun: Hororun, tmp_path: Path) -> None:
    check_right(run(hororun, double=build_double("libpeer_memory.so", tmp_path, PIECE=517)), READS, PASSES)


@pytest.mark.parametrize("after", [3, 5, 7])
def test_a_read_that_fails_later_is_done_again_by_all(hororun: Hororun, tmp_path: Path, after: int) -> None:
    """As of memory that belongs to a device; from 5 on it is in sums, which lie in the place of what they add up."""
    double = build_double("libpeer_memory.so", tmp_path, REFUSED=errno.EFAULT, AFTER=after)
    done = run(hororun, double=double)
    assert (done.returncode, done.stdout.count("all is right")) == (0, 3), done.stderr[-3000:]
    told = re.findall(rf"{READS}|{PASSES}, since rank 1 cannot read the memory of rank [02]: Bad address", done.stderr)
    assert len(told) == 2
    assert told[0] == READS


def test_a_rank_that_is_killed_in_a_call_is_an_error_that_names_it(hororun: Hororun) -> None:
    done = run(hororun, script=("100000", "1"))
    assert done.returncode != 0
    assert re.search(r"PeerLostError: .*rank 1 \(", done.stderr), done.stderr[-3000:]
    assert "AssertionError" not in done.stderr
