"""A fit with a fault on one rank, or an interrupt, ends on all ranks with the right error, and leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs import Hororun, wait_until
from skips import whole

PROGRAM = Path(__file__).with_name("lightning_faults.py")
IMPORTS_S = 240.0
"""A deadline for the import of Lightning in both ranks on a machine that does other things, too."""

pytestmark = pytest.mark.skipif(find_spec("lightning_utilities") is None, reason="lightning is not installed")


LATE = r"TimeoutError: rank 1 \(localhost\) (has not called|does not answer)"
FAULTS = {
    "kill": (137, r"rank 1 on localhost (was )?killed by SIGKILL", r"PeerLostError: rank 1 "),
    "raise": (1, r"rank 1 on localhost ended with ValueError: bad sample in shard 7", r"PeerLostError: rank 1 "),
    "interrupt": (130, "", ""),
    "stop": (1, "", LATE),
    "order": (1, "", r"MismatchError: .*rank 0 \(localhost\) .*, rank 1 \(localhost\) "),
    "uneven": (1, "", r"AbortedError: rank 1 \(localhost\) (has shut horo down|came to the end of its script)"),
}
"""The exit code, what hororun says, and the error of rank 0."""
CASES = [(strategy, fault) for strategy in ("horo", "ddp") for fault in FAULTS if (strategy, fault) != ("horo", "stop")]
"""What is stopped under "horo" is found by the timeout of a stall only."""
USUAL = {("horo", "interrupt"), ("ddp", "kill")}
"""A death under "horo" is in test_lightning_trainer.py; other faults of DDP are in test_distributed_faults.py."""


@pytest.mark.parametrize(
    ("strategy", "fault"), [case if case in USUAL else pytest.param(*case, marks=whole) for case in CASES]
)
def test_a_fit_with_a_fault_ends(hororun: Hororun, tmp_path: Path, strategy: str, fault: str) -> None:
    words = ["-np", "2", "--no-prefix", sys.executable, str(PROGRAM), str(tmp_path), strategy, fault]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    job = hororun.start(*words, environment={"PYTHONPATH": path})
    if fault == "interrupt":
        ups = [tmp_path / f"up.{rank}" for rank in range(2)]
        wait_until(lambda: all(up.exists() for up in ups), "both ranks are in a step", deadline_s=IMPORTS_S)
        job.process.send_signal(signal.SIGINT)
    done = job.finish(IMPORTS_S)
    errors = {file.suffix[1:]: file.read_text() for file in tmp_path.glob("error.*")}
    code, said, error = FAULTS[fault]
    assert done.returncode == code, (errors, done.stderr)
    assert re.search(said, done.stderr), done.stderr
    if fault == "interrupt":
        assert set(errors.values()) <= {"KeyboardInterrupt: ", "SystemExit: 1"}, errors
        return
    assert re.match(error, errors["0"]), errors
    others = {"kill": "None", "uneven": "None", "raise": "ValueError: bad sample in shard 7"}
    assert re.match(others.get(fault, error), str(errors.get("1"))), errors
