"""Pythons that were built against an old libc lack names of ``os`` and ``fcntl``; the kernel has the calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# memfd_create, the seals and the eventfds are there only where the libc of the build had them.
SCRIPT = f"""
import fcntl, os, sys
for module in (os, fcntl):
    for name in dir(module):
        if name.startswith(("memfd_", "MFD_", "eventfd", "EFD_", "F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_")):
            delattr(module, name)
assert not hasattr(os, "memfd_create")
sys.path.insert(0, {str(Path(__file__).resolve().parent.parent)!r})
from plain_rank import Rank
rank = Rank()
rank.start()
print("sum", rank.allreduce("x"))
rank.close()
"""


def test_ranks_start_where_os_has_no_memfd_and_no_eventfd() -> None:
    hororun = ("-m", "horo.runner", "-np", "2", "--oversubscribe", "--no-prefix", sys.executable)
    for total, launcher in ((1.0, ()), (3.0, hororun)):
        command = [sys.executable, *launcher, "-c", SCRIPT]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [f"sum [{total}, {total}]"] * (2 if launcher else 1)
