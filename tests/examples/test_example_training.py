"""The examples train on any number of ranks; scripts for batch systems are complete; wrong arguments are named."""

import ast
import functools
import importlib
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from example_runs import ROOT, forked, launcher, start
from skips import whole


def forked_output_of(script: str, *arguments: str) -> list[str]:
    """What it prints in ranks that are forked."""
    ends, texts = zip(*forked(script, *arguments), strict=True)
    assert ends == (0, 0), ends
    return "".join(texts).splitlines()


def numbers(line: str) -> list[float]:
    return [float(text) for text in re.findall(r"[-+]?\d+\.\d+", line)]


def test_a_resumed_job_takes_the_steps_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    checkpoint = ["--checkpoint", str(tmp_path / "run.pt")]
    whole = forked_output_of("imagenet.py", "--epochs", "3")
    assert [line.split()[1] for line in whole] == ["1/3", "2/3", "3/3"]
    losses = [numbers(line)[0] for line in whole]
    assert losses[2] < losses[1] < losses[0]
    first = forked_output_of("imagenet.py", *checkpoint, "--epochs", "2")
    second = forked_output_of("imagenet.py", *checkpoint, "--epochs", "3")
    assert [line.split()[1] for line in first + second] == ["1/2", "2/2", "3/3"]
    assert [numbers(line)[0] for line in first + second] == losses
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_accumulated_gradients_fit_the_line() -> None:
    (line,) = forked_output_of("accumulation.py", "--batches-per-step", "3")
    assert line.startswith("96 samples per step: y = ")
    slope, offset = numbers(line)
    assert slope == pytest.approx(3, abs=0.1)
    assert offset == pytest.approx(-1, abs=0.1)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("imagenet --images 63", "--images 63 is less than one batch of 32 per rank"),
        ("digits --batch-size 5000", "--batch-size 5000 is more than the 1437 training images"),
        ("digits --batch-size 97", "--batch-size 97 is not a multiple of the 2 ranks"),
    ],
)
def test_samples_that_ranks_cannot_share_are_named(command: str, said: str) -> None:
    script, *words = command.split()
    ends = [end for end, _ in forked(f"{script}.py", *words)]
    assert ends == [f"{script}.py: {said}"] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_learns(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    if dtype == "float16" and not hasattr(torch.amp, "GradScaler"):
        for end, _ in forked("mixed_precision.py", "--dtype", dtype):
            assert "has no GradScaler for the CPU" in str(end)
        return
    (line,) = forked_output_of("mixed_precision.py", "--dtype", dtype)
    assert line.startswith(f"{dtype}: ")
    begin, end = numbers(line)
    assert end < begin / 2


def test_the_gan_learns_the_bell_curve() -> None:
    (line,) = forked_output_of("gan.py")
    assert line.startswith("2000 samples: ")
    mean, deviation = numbers(line)
    assert mean == pytest.approx(4, abs=0.5)
    assert 0.1 < deviation < 1


DIGITS = str(ROOT / "examples" / "digits.py")


@functools.cache
def lines_of(launcher_name: str, ranks: int) -> tuple[str, ...]:
    """Progress and result of three epochs; the first line, which names the ranks, is left out."""
    words = [DIGITS, "--epochs", "3"]
    if launcher_name == "forked":
        ((_, printed),) = forked(*words, ranks=ranks)
    else:
        printed = start([*launcher(launcher_name, ranks), *words]).stdout
    return tuple(line for line in printed.splitlines() if line.startswith(("epoch", "test accuracy")))


def test_one_process_learns_the_digits() -> None:
    *progress, result = lines_of("forked", 1)
    assert [line.split()[1] for line in progress] == ["1/3", "2/3", "3/3"]
    match = re.fullmatch(r"test accuracy: (0\.\d{4}) \((\d+) of 360 images\)", result)
    assert match
    # A tenth is chance; three passes are enough for nine tenths.
    assert float(match.group(1)) > 0.9
    assert float(match.group(1)) == pytest.approx(int(match.group(2)) / 360, abs=1e-4)


@pytest.mark.parametrize(("launcher_name", "ranks"), [("hororun", 2), pytest.param("torchrun", 2, marks=whole)])
def test_ranks_print_the_lines_of_one_process(launcher_name: str, ranks: int) -> None:
    assert lines_of(launcher_name, ranks) == lines_of("forked", 1)


def test_missing_scikit_learn_is_one_sentence() -> None:
    # Without numpy, too: a torch that cannot use the one that is installed writes pages about that.
    hidden = "sys.modules['sklearn'] = sys.modules['numpy'] = None"
    code = f"import runpy, sys; {hidden}; runpy.run_path({DIGITS!r}, run_name='__main__')"
    done = start([sys.executable, "-W", "ignore", "-c", code], expected_code=1)
    assert done.stderr.startswith("digits.py: scikit-learn, which brings the images, is not installed")
    assert len(done.stderr.splitlines()) == 1


@functools.cache
def lightning_line(launcher_name: str, ranks: int, *words: str) -> str:
    """The result of two epochs with Lightning, which two ranks reach alike, whoever has started them."""
    if find_spec("lightning_utilities") is None:
        pytest.skip("lightning is not installed")
    command = [*launcher(launcher_name, ranks), str(ROOT / "examples" / "lightning_digits.py"), "--epochs", "2", *words]
    lines = start(command).stdout.splitlines()
    (found,) = [line for line in lines if line.startswith("test accuracy")]
    return found


def test_lightning_learns_the_digits() -> None:
    match = re.fullmatch(r"test accuracy: (0\.\d{4}) of 360 images", lightning_line("python", 1, "--devices", "2"))
    assert match
    assert float(match.group(1)) > 0.9


@whole
@pytest.mark.parametrize("launcher_name", ["hororun", "torchrun"])
def test_lightning_learns_them_alike_under_other_launchers(launcher_name: str) -> None:
    assert lightning_line(launcher_name, 2) == lightning_line("python", 1, "--devices", "2")


SYNTHETIC = str(ROOT / "examples" / "synthetic_benchmark.py")
TINY = ["--no-cuda", "--model", "tiny", "--image-size", "32", "--batch-size", "2"]
SHORT = ["--num-warmup-batches", "1", "--num-batches-per-iter", "1", "--num-iters", "2"]


@pytest.mark.parametrize(
    ("launcher_name", "ranks", "options"),
    [("forked", 1, []), ("hororun", 2, ["--fp16-allreduce"]), ("forked", 2, ["--use-adasum"])],
)
def test_prints_the_lines_in_order(launcher_name: str, ranks: int, options: list[str]) -> None:
    words = [*TINY, *SHORT, *options]
    if launcher_name == "forked":
        ends, texts = zip(*forked("synthetic_benchmark.py", *words, ranks=ranks), strict=True)
        assert ends == (0,) * ranks
        printed = "".join(texts)
    else:
        printed = start([*launcher(launcher_name, ranks), SYNTHETIC, *words]).stdout
    number = r"\d+\.\d"
    expected = [
        "Model: tiny",
        "Batch size: 2",
        f"Number of CPUs: {ranks}",
        r"Running warmup\.\.\.",
        r"Running benchmark\.\.\.",
        rf"Iter #0: {number} img/sec per CPU",
        rf"Iter #1: {number} img/sec per CPU",
        rf"Img/sec per CPU: {number} \+-{number}",
        rf"Total img/sec on {ranks} CPU\(s\): {number} \+-{number}",
    ]
    lines = printed.splitlines()
    assert len(lines) == len(expected), printed
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), f"{line!r} is not {pattern!r}"


BATCH = ROOT / "examples" / "batch"
FILES = sorted(BATCH.iterdir())
SHELL = [file for file in FILES if file.suffix != ".yaml"]
DIRECTIVES = {"slurm": "#SBATCH", "slurm-mpi": "#SBATCH", "pbs": "#PBS", "lsf": "#BSUB", "sge": "#$"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_says_how_to_submit_it_and_what_to_change(file: Path) -> None:
    comment = "\n".join(line for line in file.read_text().splitlines() if line.startswith("# "))
    assert file.name in comment
    assert "# Change: " in comment
    for document in ("examples/README.md", "docs/how-to/hpc.md"):
        assert f"batch/{file.name}" in (ROOT / document).read_text(), document


@pytest.mark.parametrize("file", SHELL, ids=lambda file: file.name)
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
