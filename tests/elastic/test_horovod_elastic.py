"""Elastic scripts for Horovod under ``hororun --horovod``: its sizes of each epoch while hosts come, go and fail.

``localhost`` and ``127.0.0.1`` are two hosts to it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from jobs import TORCH_S, Hororun

SCRIPT = str(Path(__file__).with_name("horovod_training.py"))
PATIENCE_S = 8 * TORCH_S
ONE, OTHER, TWO = "localhost:1", "127.0.0.1:1", "localhost:2"


class Job:
    """A job of the script.

    Args:
        folder: of its files.
        hosts: found during each epoch; the last ones stay.
        exits: as the script has them.
    """

    def __init__(self, folder: Path, *hosts: list[str], exits: dict[int, list[int]] | None = None) -> None:
        self.log = folder / "log"
        self.log.touch()
        found = folder / "hosts"
        cases = [f"{epoch}) printf '%s\\n' {' '.join(each)};;" for epoch, each in enumerate(hosts[:-1])]
        last = f"*) printf '%s\\n' {' '.join(hosts[-1])};;"
        found.write_text("\n".join(["#!/bin/sh", f"case $(grep -c . {self.log}) in", *cases, last, "esac"]))
        found.chmod(0o700)
        changes = [epoch for epoch, each in enumerate(hosts[:-1]) if each != hosts[epoch + 1]]
        plan = {"batches": 3, "changes": changes, "exits": exits or {}}
        self.words = ("--horovod", "--host-discovery-script", str(found), SCRIPT, str(self.log), json.dumps(plan))

    def run(self, hororun: Hororun, *options: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        return hororun.start(*options, *self.words, where=None, environment={"PYTHONPATH": path}).finish(PATIENCE_S)

    def column(self, *names: str) -> list[tuple[Any, ...]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [tuple(line[name] for name in names) for line in lines]


def test_hosts_are_added_and_removed_between_epochs(hororun: Hororun, tmp_path: Path) -> None:
    job = Job(tmp_path, [ONE], [ONE, OTHER], [OTHER])
    done = job.run(hororun, "-np", "1", "--min-np", "1", "--max-np", "2")
    assert done.returncode == 0, done.stderr
    assert job.column("epoch", "size", "begins") == [(0, 1, 1), (1, 2, 2), (2, 1, 3)], done.stderr
    assert job.column("host", "started_as") == [("localhost", 0), ("localhost", 0), ("127.0.0.1", 1)]
    assert job.column("commits") == [(3,), (7,), (11,)]
    assert job.column("rates") == [(1,), (2,), (1,)]


def test_a_host_with_a_rank_that_fails_is_left_alone(hororun: Hororun, tmp_path: Path) -> None:
    job = Job(tmp_path, [TWO, OTHER], exits={0: [1, 0]})
    done = job.run(hororun, "-np", "3", "--min-np", "1")
    assert done.returncode == 0, done.stderr
    assert job.column("size", "begins") == [(3, 1), (1, 2), (1, 2)], done.stderr
    assert job.column("host", "started_as") == [("localhost", 0), ("127.0.0.1", 2), ("127.0.0.1", 2)]
    assert job.column("commits") == [(3,), (7,), (11,)]
