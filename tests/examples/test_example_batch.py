"""The scripts for batch systems are complete; what Slurm can run is run in ``tests/cluster``."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from example_runs import ROOT

BATCH = ROOT / "examples" / "batch"
FILES = sorted(BATCH.iterdir())
SHELL = [file for file in FILES if file.suffix != ".yaml"]
DIRECTIVES = {"slurm": "#SBATCH", "slurm-mpi": "#SBATCH", "pbs": "#PBS", "lsf": "#BSUB", "sge": "#$"}


def name(file: Path) -> str:
    return file.name


@pytest.mark.parametrize("file", FILES, ids=name)
def test_each_says_how_to_submit_it_and_what_to_change(file: Path) -> None:
    comment = "\n".join(line for line in file.read_text().splitlines() if line.startswith("# "))
    assert file.name in comment
    assert "# Change: " in comment
    for document in ("examples/README.md", "docs/how-to/hpc.md"):
        assert f"batch/{file.name}" in (ROOT / document).read_text(), document


@pytest.mark.parametrize("file", SHELL, ids=name)
def test_shell_scripts_are_correct_and_their_requests_come_before_the_first_command(file: Path) -> None:
    subprocess.run(["bash", "-n", str(file)], check=True)
    lines = file.read_text().splitlines()
    requests = [number for number, line in enumerate(lines) if line.startswith(DIRECTIVES[file.stem] + " ")]
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    assert lines[0] == "#!/bin/bash"
    assert len(requests) >= 3
    assert max(requests) < min(commands)


def test_the_kubernetes_job_starts_as_many_ranks_as_its_workers_have_slots() -> None:
    job = yaml.safe_load((BATCH / "kubernetes-mpijob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    replicas = job["spec"]["mpiReplicaSpecs"]
    assert set(replicas) == {"Launcher", "Worker"}
    containers = [kind["template"]["spec"]["containers"] for kind in replicas.values()]
    assert all(len(each) == 1 and each[0]["name"] and each[0]["image"] for each in containers)
    command = replicas["Launcher"]["template"]["spec"]["containers"][0]["command"]
    assert all(isinstance(word, str) for word in command)
    assert int(command[command.index("-np") + 1]) == job["spec"]["slotsPerWorker"] * replicas["Worker"]["replicas"]


def strings(source: str) -> Iterator[str]:
    """All texts in a Python file; what is filled in at run time is a newline."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\n" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def messages_of(page: str) -> list[str]:
    """What the tables of messages quote first, and all that a row quotes which begins with ``horo:``."""
    _, _, tables = (ROOT / "docs" / "how-to" / page).read_text().partition("| message |")
    rows = tables.splitlines()
    whole = [row.split("`")[1] for row in rows if row.startswith("| `")]
    return whole + [
        part for row in rows if row.startswith("| horo: ") for part in row.partition(" | ")[0].split("`")[1::2]
    ]


@pytest.mark.parametrize("page", ["hpc.md", "troubleshooting.md"])
def test_messages_that_a_guide_explains_are_horos(page: str) -> None:
    files = [*ROOT.glob("horo/**/*.py"), *ROOT.glob("runner/**/*.py")]
    said = [text for file in files for text in strings(file.read_text())]
    said += [file.read_text() for file in ROOT.glob("native/src/**/*.c")]
    quoted = messages_of(page)
    assert len(quoted) >= 10
    assert [text for text in quoted if not any(text in each for each in said)] == []
