"""Jobs that torchrun starts, and that a rank ends: torchrun reports the process that has ended first."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
import atexit, sys, time
sys.path.insert(0, {tests!r})
from plain_rank import Rank
from horo.bootstrap import ending

ending._AFTER_CAUSE_S = 60  # until torchrun has seen the end of the cause, which may take long on a busy machine
rank = Rank()
number, _ = rank.start()
rank.allreduce("first")
if number == 1:
    atexit.register(time.sleep, 0.3)  # the stimulus: the cause is slower to end than its victim
    {end}
try:
    rank.allreduce("second")
except Exception:
    {answer}
"""
RAISES, EXITS = "raise ValueError('bad sample in shard 7')", "sys.exit(7)"


@pytest.mark.parametrize(
    ("end", "answer", "code"),
    [(RAISES, "raise", "1"), (RAISES, "rank.close(); raise", "1"), (EXITS, "rank.close(); sys.exit(9)", "7")],
    ids=["an exception", "its victim leaves the job first", "sys.exit, and its victim has a code of its own"],
)
def test_the_rank_that_is_the_cause_is_the_first_failure(tmp_path: Path, end: str, answer: str, code: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(tests=str(Path(__file__).resolve().parent.parent), end=end, answer=answer))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(script)], check=False, capture_output=True, text=True, timeout=200
    )
    assert done.returncode != 0
    assert ("PeerLostError: rank 1 (" in done.stderr) == ("exit" not in answer)
    assert re.findall(r"failed \(exitcode: (\d+)\) local_rank: (\d)", done.stderr) == [(code, "1")], done.stderr
