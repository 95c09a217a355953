"""Jobs that a real mpirun starts, for tests that watch them from outside."""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

_DEADLINE_S = 100.0
_TESTS = str(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True)
class Ended:
    """What a job left."""

    code: int
    output: str
    errors: str

    @property
    def lines(self) -> list[str]:
        """Of the output, sorted: ranks write in any order."""
        return sorted(self.output.splitlines())


def why_not() -> str | None:
    """Why no job can be started from here; None if it can."""
    if not os.environ.get("MPI4PY_LIBMPI") or shutil.which("mpirun") is None:
        return "no MPI is chosen: `make test-mpi` runs these tests under one after the other"
    if any(os.environ.get(name) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")):
        return "this process is a rank itself"
    return None


@dataclass(frozen=True)
class MpiJobs:
    """Starts scripts under the MPI of the environment."""

    folder: Path

    def run(
        self, size: int, script: str, *arguments: str, environ: Mapping[str, str] | None = None, goes_on: bool = False
    ) -> Ended:
        """The end of ``mpirun -n size python script arguments``; a job that does not end in time fails the test.

        ``size`` 0: without mpirun. ``goes_on``: where it can, mpirun lets the others go on when a rank ends early.
        """
        options = []
        if goes_on:
            version = ["mpirun", "--version"]
            told = subprocess.run(version, capture_output=True, text=True, check=True, timeout=_DEADLINE_S).stdout
            options = ["-disable-auto-cleanup"] if "HYDRA" in told else []  # else it kills them and drops what they say
        launcher = ["mpirun", *options, "-n", str(size)] if size else []
        path = self.folder / "script.py"
        path.write_text(textwrap.dedent(script), encoding="utf-8")
        # Unbuffered, a line and its end are two writes, and mpirun may put the words of another rank between them.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        own = {
            "OMP_NUM_THREADS": "1", "HORO_START_TIMEOUT": "60", "TMPDIR": str(self.folder),
            "PYTHONPATH": os.pathsep.join(filter(None, [_TESTS, os.environ.get("PYTHONPATH")])), **(environ or {}),
        }  # fmt: skip
        process = subprocess.Popen(
            [*launcher, sys.executable, str(path), *arguments],
            env={**inherited, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            output, errors = process.communicate(timeout=_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            pytest.fail(f"the job did not end in time\n{output.decode()}\n{errors.decode()}")
        # Some launchers put NUL bytes into their own messages.
        texts = [text.decode("utf-8", "replace").replace("\0", "") for text in (output, errors)]
        return Ended(process.returncode, *texts)
