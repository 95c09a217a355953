"""The scripts of docs/how-to/preemption.md: a job that is told to stop saves, asks for its requeue, and goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from document_blocks import HOW_TO, blocks_of
from example_runs import LIMIT_SECONDS

(PAGE,) = (page for page in HOW_TO if page.name == "preemption.md")
SCRIPTS = {block.mark: block.code for block in blocks_of(PAGE) if block.mark}


def prepare(folder: Path) -> dict[str, str]:
    """The scripts, and a Slurm and a hororun in PATH; returns the environment."""
    (folder / "train.py").write_text(SCRIPTS["script=train"])
    for name in ("batch", "srun"):
        (folder / f"{name}.sh").write_text(SCRIPTS[f"script={name}"])
    programs = folder / "bin"
    programs.mkdir()
    hororun = f'exec "{sys.executable}" -m horo.runner -np 2 -H localhost:2 --no-prefix "$@"'
    doubles = {
        "hororun": hororun,
        "python": f'exec "{sys.executable}" "$@"',
        "scontrol": f'echo "$@" >> "{folder}/scontrol.log"',
        "srun": f'echo $$ > "{folder}/srun.pid"\n[ "$1" = --kill-on-bad-exit=0 ] && shift && {hororun}',
    }
    for name, line in doubles.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HORO", "SLURM_"))}
    return {**kept, "PATH": f"{programs}:{kept['PATH']}", "SLURM_JOB_ID": "42", "OMP_NUM_THREADS": "1"}


def run_until_told(folder: Path, environment: dict[str, str], script: str) -> int:
    """Starts the script, tells it or its step to stop once it trains, and returns the step at which it began."""
    process = subprocess.Popen(
        ["bash", f"{script}.sh"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        match = re.fullmatch(r"begins at step (\d+)\n", process.stdout.readline())
        assert match
        told = process.pid if script == "batch" else int((folder / "srun.pid").read_text())
        os.kill(told, signal.SIGUSR1)
        process.stdout.read()
        assert process.wait(LIMIT_SECONDS) == 75
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
    return int(match.group(1))


def test_a_job_that_is_told_to_stop_saves_is_requeued_and_goes_on(tmp_path: Path) -> None:
    """First by the script for hororun, then by that for srun, whose step gets the signal."""
    environment = prepare(tmp_path)
    assert run_until_told(tmp_path, environment, "batch") == 0
    assert (tmp_path / "scontrol.log").read_text() == "requeue 42\n"
    assert run_until_told(tmp_path, environment, "srun") > 0
    assert (tmp_path / "scontrol.log").read_text() == "requeue 42\n" * 2
