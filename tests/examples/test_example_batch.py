"""Scripts for batch systems are complete (what Slurm can run is run in tests/cluster); wrong arguments are named."""

import ast
import importlib
import runpy
import subprocess
import sys
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


BENCHMARKS = [
    ("allreduce --np 0", "--np 0: at least 1"),
    ("allreduce --turn-limit-s nan", "--turn-limit-s nan: must be more than 0"),
    ("allreduce --min 8 --max 4", "--max 4 is below --min 8"),
    ("allreduce --peers horo,nccl", "'horo,nccl' knows no 'nccl'; known are horo, gloo, openmpi, mpich, horovod"),
    ("allreduce --peers gloo,gloo", "'gloo,gloo' names one twice"),
    ("allreduce --beside -1", "--beside -1: not below 0"),
    ("allreduce --max 4T", "'4T' is not a size"),
    ("autotune --rate bananas", "--rate"),
    ("autotune --steps 0", "--steps"),
    ("collectives --operation alltoall,gossip", "'alltoall,gossip' knows no 'gossip'; known are reducescatter, allt"),
    ("gpu_step --models vgg", "--models: no 'vgg'"),
    ("gpu_gradients --device cpu --np 3", "--np 3: there is a GPU each for 1 to 2 ranks"),
    ("gpu_staging --sizes 6", "'6': float32 takes 4 bytes each"),
    ("gpu_shared --batch 0", "--batch 0: at least 1"),
    ("negotiation --layouts 1x9999999", "open files in one process"),
    ("negotiation --layouts 4x0", "is not a layout; write hosts x ranks per host"),
    ("negotiation --tensors 1,0", "'1,0' is not a list of counts"),
    ("startup --warm-up -1", "--warm-up -1: at least 0"),
    ("idle --seconds 0", "--seconds 0: must be more than 0"),
    ("footprint --np 0", "--np 0: at least 1"),
    ("two_hosts --hosts 1", "--hosts 1: there is no link with less than 2"),
    ("two_hosts --rates 1gbps", "'1gbps' is not a rate"),
    ("two_hosts --size 6", "--size 6: float32 takes 4 bytes each"),
    ("suite alreduce", "'alreduce'"),
    ("check alreduce", "'alreduce'"),
]
EXAMPLES = [
    ("accumulation --batches-per-step 0", "--batches-per-step 0: at least 1"),
    ("digits --lr nan", "--lr nan: more than 0"),
    ("digits --epochs 0", "--epochs 0: at least 1"),
    ("gan --batch-size 0", "--batch-size 0: at least 1"),
    ("imagenet --warmup-epochs -1", "--warmup-epochs -1: at least 0"),
    ("imagenet --base-lr -1", "--base-lr -1.0: more than 0"),
    ("imagenet --checkpoint /not/there/run.pt", "--checkpoint /not/there/run.pt: there is no folder /not/there"),
    ("mixed_precision --steps 0", "--steps 0: at least 1"),
    ("synthetic_benchmark --num-warmup-batches -1", "--num-warmup-batches -1: at least 0"),
    ("synthetic_benchmark --model vgg", "invalid choice: 'vgg'"),
]


@pytest.mark.parametrize(("command", "said"), BENCHMARKS, ids=[command for command, _ in BENCHMARKS])
def test_a_bad_argument_of_a_benchmark_is_named(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    script, *words = command.split()
    with pytest.raises(SystemExit):
        importlib.import_module(script).parse_arguments(words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("command", "said"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_a_bad_argument_of_an_example_is_named(
    command: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / f"{sys.argv[0]}.py"))["parse_arguments"]()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
