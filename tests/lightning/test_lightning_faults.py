"""A fit in which a rank dies, fails or is interrupted ends on all ranks, with the right error, and leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs import Hororun, wait_until

PROGRAM = Path(__file__).with_name("lightning_faults.py")
IMPORTS_S = 240.0
"""A deadline for the import of Lightning in both ranks on a machine that does other things, too."""

pytestmark = pytest.mark.skipif(find_spec("lightning_utilities") is None, reason="lightning is not installed")


@pytest.mark.parametrize("strategy", ["horo", "ddp"])
@pytest.mark.parametrize("fault", ["kill", "raise", "interrupt"])
def test_a_fit_with_a_fault_ends(hororun: Hororun, tmp_path: Path, strategy: str, fault: str) -> None:
    if (strategy == "ddp") != (fault == "kill") and os.environ.get("HORO_ALL_CASES") != "1":
        pytest.skip("`make test-all` runs it")  # a rank dies under "horo" in test_lightning_trainer.py
    job = hororun.start("-np", "2", "--no-prefix", sys.executable, str(PROGRAM), str(tmp_path), strategy, fault)
    if fault == "interrupt":
        ups = [tmp_path / f"up.{rank}" for rank in range(2)]
        wait_until(lambda: all(up.exists() for up in ups), "both ranks are in a step", deadline_s=IMPORTS_S)
        job.process.send_signal(signal.SIGINT)
    done = job.finish(IMPORTS_S)
    errors = {file.suffix[1:]: file.read_text() for file in tmp_path.glob("error.*")}
    code, said = {
        "kill": (137, r"rank 1 on localhost (was )?killed by SIGKILL"),
        "raise": (1, r"rank 1 on localhost ended with ValueError: bad sample in shard 7"),
        "interrupt": (130, ""),
    }[fault]
    assert done.returncode == code, (errors, done.stderr)
    assert re.search(said, done.stderr), done.stderr
    if fault == "interrupt":
        assert set(errors.values()) <= {"KeyboardInterrupt: ", "SystemExit: 1"}, errors
        return
    assert errors["0"].startswith("PeerLostError: rank 1 "), errors
    assert errors.get("1") == (None if fault == "kill" else "ValueError: bad sample in shard 7"), errors
