"""Pythons that were built against an old libc lack names of ``os`` and ``fcntl``; the kernel has the calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# memfd_create, the seals and the eventfds are there only where the libc of the build had them.
SCRIPT = """
import fcntl, os
for module in (os, fcntl):
    for name in dir(module):
        if name.startswith(("memfd_", "MFD_", "eventfd", "EFD_", "F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_")):
            delattr(module, name)
assert not hasattr(os, "memfd_create")
import torch
import horo.torch as hvd
hvd.init()
print("sum", hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist())
"""


def test_ranks_start_where_os_has_no_memfd_and_no_eventfd(tmp_path: Path) -> None:
    script = tmp_path / "old.py"
    script.write_text(SCRIPT)
    for size, launcher in ((1, ()), (2, ("-m", "horo.runner", "-np", "2", "--oversubscribe", "--no-prefix"))):
        command = [sys.executable, *launcher, *([sys.executable] if launcher else []), str(script)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [f"sum [{float(size)}, {float(size)}]"] * size
