"""Jobs that torchrun starts, and that a rank ends: torchrun reports the process that has ended first."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TRAIN = """
import atexit, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from plain_rank import Rank

rank = Rank()
number, _ = rank.start()
rank.allreduce("first")
if number == 1:
    atexit.register(time.sleep, 0.3)  # the stimulus: the cause is slower to end than its victim
    {end}
{go_on}
"""


def run(tmp_path: Path, end: str, go_on: str = 'rank.allreduce("second")', *, shows_error: bool = True) -> str:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(tests=str(Path(__file__).resolve().parent.parent), end=end, go_on=go_on))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, str(script)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert not shows_error or "PeerLostError: rank 1 (" in done.stderr
    return done.stderr


def test_the_rank_that_is_the_cause_is_the_first_failure(tmp_path: Path) -> None:
    said = run(tmp_path, "raise ValueError('bad sample in shard 7')")
    assert re.findall(r"failed \(exitcode: (\d+)\) local_rank: (\d)", said) == [("1", "1")], said


def test_the_code_of_sys_exit_is_that_of_the_first_failure(tmp_path: Path) -> None:
    said = run(tmp_path, "sys.exit(7)")
    assert re.findall(r"failed \(exitcode: (\d+)\) local_rank: (\d)", said) == [("7", "1")], said


LEAVES = """
try:
    rank.allreduce("second")
finally:
    rank.close()
"""


def test_a_rank_that_leaves_the_job_before_its_error_ends_it_is_not_the_first_failure(tmp_path: Path) -> None:
    said = run(tmp_path, "raise ValueError('bad sample in shard 7')", LEAVES)
    assert re.findall(r"failed \(exitcode: (\d+)\) local_rank: (\d)", said) == [("1", "1")], said


TURNS = """
try:
    rank.allreduce("second")
except Exception:
    rank.close()
    sys.exit(9)
"""


def test_nor_is_one_that_ends_with_a_code_of_its_own(tmp_path: Path) -> None:
    said = run(tmp_path, "sys.exit(7)", TURNS, shows_error=False)
    assert re.findall(r"failed \(exitcode: (\d+)\) local_rank: (\d)", said) == [("7", "1")], said
