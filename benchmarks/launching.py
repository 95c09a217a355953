"""Jobs whose ranks measure something and end: how they start, and what becomes of them in any case."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from contest import LAUNCHER_NAMES, LAUNCHER_PREFIXES, OUTPUT_LINES, ContestError

__all__ = ["Job", "environment", "hororun", "run", "torchrun"]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, as a user's shell has it: nothing of a launcher, and Python may keep bytecode."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_NAMES
        and not name.startswith(LAUNCHER_PREFIXES)
        and name not in ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
    }
    return {**kept, "OMP_NUM_THREADS": "1", **(more or {})}


def hororun(ranks: int, words: Sequence[str]) -> list[str]:
    """The command that starts a Python script on ``ranks`` ranks of this machine."""
    slots = ["-H", f"localhost:{ranks}", "--no-prefix", "--grace-seconds", "1"]
    return [sys.executable, "-m", "horo.runner", "-np", str(ranks), *slots, sys.executable, *words]


def torchrun(ranks: int, words: Sequence[str]) -> list[str]:
    """The same by torchrun, with the rendezvous that is quickest on one machine: a store at a port that is known."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    where = ["--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [sys.executable, "-m", "torch.distributed.run", *where, *words]


class Job:
    """A command with all that it starts. A context manager: nothing of it is left behind."""

    def __init__(self, command: Sequence[str], more: Mapping[str, str] | None = None) -> None:
        self.command = list(command)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed in __exit__)
        self.process = subprocess.Popen(
            self.command,
            env=environment(more),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()  # a launcher ends its ranks then, also those in sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._output.close()

    def lines(self) -> list[str]:
        """What it has written so far."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace").splitlines()

    def finish(self, limit_s: float) -> list[str]:
        """Waits for its end; returns what it wrote.

        Raises:
            ContestError: it failed, or took longer.
        """
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise self.error(f"no end after {limit_s:g} s") from None
        if code != 0:
            raise self.error(f"exit code {code}")
        return self.lines()

    def error(self, what: str) -> ContestError:
        """To be raised: a sentence with the command and the last lines that it wrote."""
        said = "".join(f"\n    {line}" for line in self.lines()[-OUTPUT_LINES:])
        return ContestError(f"{what}: {' '.join(self.command)}{said}")


def run(command: Sequence[str], *, limit_s: float, more: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Runs a command to its end and returns the JSON objects among the lines that it wrote.

    Raises:
        ContestError: it failed, or took longer.
    """
    with Job(command, more) as job:
        return [json.loads(line) for line in job.finish(limit_s) if line.startswith("{")]
