"""The pages: what they tell a reader to type works, and their recipes keep their promises."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from document_blocks import HOW_TO, PAGES, Block, blocks_of, python_blocks, runs_here
from example_runs import LIMIT_SECONDS, ROOT, forked, start
from jobs import Hororun, port_for_later
from rank_pool import RankPool

import horo.torch as hvd
from horo.bench.options import build_parser as build_bench_parser
from horo.config.table import GROUPS, names_of
from horo.runner.cli import parse
from horo.runner.cli.options import build_parser
from horo.runner.config import JobError

VARIABLES = [*names_of(*GROUPS), "HORO_HOST_MARK", "HORO_END"]
"""The last two are no settings: one marks the processes of a job for other processes, one is an event of a timeline."""

# fmt: off
FOREIGN_OPTIONS = {  # of srun and sbatch, mpirun and mpiexec, containers, torchrun, Lightning
    "--mpi", "--cpus-per-task", "--cpu-bind", "--ntasks", "--ntasks-per-node", "--distribution", "--signal",
    "--requeue", "--kill-on-bad-exit", "--open-mode", "--time", "--bind-to", "--map-by", "--mca",
    "--allow-run-as-root", "--cleanenv", "--contain", "--bind", "--network", "--ipc", "--env",
    "--disable-auto-cleanup", "--rdzv-endpoint", "--master-addr", "--max-restarts", "--nnodes", "--pid", "--nv",
    "--fakeroot", "--no-capture-output", "--overlap", "--mem", "--smpiargs", "--gpus-per-task", "--trainer",
}
# fmt: on


def inline_code(text: str) -> list[str]:
    without_blocks = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", without_blocks)


def commands_of(page: Path) -> list[str]:
    """Every hororun command on the page that is given in full: alone on a line of a block, or in inline code."""
    lines = [
        line for block in blocks_of(page) if block.language in {"", "sh", "bash"} for line in block.code.splitlines()
    ]
    lines += inline_code(page.read_text(encoding="utf-8"))
    found = [re.sub(r"^\S*=\S+ ", "", line.strip().removeprefix("$ ")) for line in lines]
    return [line.rstrip("\\& ") for line in found if re.match(r"(exec )?hororun\s", line) and "..." not in line]


def test_python_blocks_run_on_two_ranks() -> None:
    blocks = [block for page in PAGES for block in python_blocks(page)]
    assert {block.mark.partition("=")[0] for block in blocks} <= {"", "script", "fragment"}
    for block in blocks:
        block.compiled()
    rank = str(Path(__file__).with_name("document_rank.py"))
    (end, said), other = forked(rank, *map(str, PAGES))
    expected = sum(map(runs_here, blocks))
    assert expected >= 10
    assert (end, said.splitlines()[-1], other[0]) == (0, f"{expected} blocks", 0)


def script(name: str, folder: Path, page: str = "how-to/from-ddp.md") -> str:
    (block,) = (b for b in python_blocks(ROOT / "docs" / page) if b.mark == f"script={name}")
    path = folder / f"train_{name}.py"
    path.write_text(f"import os\nos.chdir({str(folder)!r})\n{block.code}")
    return str(path)


def test_the_script_with_ddp_and_the_one_with_horo_print_the_same_loss(tmp_path: Path) -> None:
    ddp, horo = ("".join(text for _, text in forked(script(name, tmp_path))) for name in ("ddp", "horo"))
    assert re.fullmatch(r"loss \d\.\d{6}\n", ddp) and re.fullmatch(r"loss \d\.\d{6}\n", horo)
    assert float(horo.split()[1]) == pytest.approx(float(ddp.split()[1]), abs=2e-6)


@pytest.mark.parametrize("name", ["mingpt", "nanogpt", "torchvision"])
def test_a_script_with_few_changes_trains_as_one_process(tmp_path: Path, name: str) -> None:
    path = Path(script(name, tmp_path, "how-to/few-changes.md"))
    ends, texts = zip(*forked(str(path)), strict=True)
    code = path.read_text(encoding="utf-8").replace("batch_size=8", "batch_size=16")
    path.write_text(code, encoding="utf-8")
    ((end, text),) = forked(str(path), ranks=1)
    assert (*ends, end) == (0, 0, 0)
    together, alone = texts[0].splitlines(), text.splitlines()
    assert len(together) == len(alone) == (3 if name == "torchvision" else 1)
    if name != "nanogpt":  # there each rank draws samples of its own
        numbers = [
            [float(number) for number in re.findall(r"\d+\.\d+", " ".join(lines))] for lines in (together, alone)
        ]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-3)


def test_the_script_with_run_gets_the_results_that_it_names(tmp_path: Path) -> None:
    path = Path(script("run", tmp_path, "reference/hororun.md"))
    code = path.read_text(encoding="utf-8")
    (promised,) = re.findall(r"results = .* # (.*)$", code, flags=re.MULTILINE)
    path.write_text(f"{code}    print(results)\n", encoding="utf-8")
    assert start([sys.executable, str(path)]).stdout == f"{promised}\n"


def test_lines_of_the_horo_script_that_differ_are_marked() -> None:
    ddp, horo = (b.code for b in python_blocks(ROOT / "docs" / "how-to" / "from-ddp.md") if b.mark.startswith("script"))
    new = [line for line in horo.splitlines() if line not in ddp.splitlines()]
    assert new == [line for line in horo.splitlines() if re.search(r" # (changed|new)$", line)]


def test_every_hororun_command_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [(page, line) for page in PAGES for line in commands_of(page)]
    assert len(commands) >= 15
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("h1 slots=4\nh2 slots=4\n")
    for name in ("DATA", "NAME"):
        monkeypatch.setenv(name, "x")
    # A batch job, which gives hosts and slots where a command names none.
    for name, value in (("LSB_JOBID", "1"), ("LSB_MCPU_HOSTS", "h1 4 h2 4")):
        monkeypatch.setenv(name, value)
    wrong = []
    for page, line in commands:
        words = shlex.split(line, comments=True)
        try:
            parse(words[words.index("hororun") + 1 :])
        except (JobError, SystemExit) as error:
            if isinstance(error, SystemExit) and not error.code:
                continue  # gives information, as --help does
            if str(error).startswith("no command given") and line in inline_code(page.read_text(encoding="utf-8")):
                continue  # only names options
            wrong.append(f"{page.name}: {line}: {error}")
    assert wrong == []


def test_options_variables_and_functions_that_pages_name_exist() -> None:
    parsers = (build_parser(), build_bench_parser())
    known = {name for each in parsers for action in each._actions for name in action.option_strings} | FOREIGN_OPTIONS
    wrong = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for code in inline_code(text):
            option = re.match(r"--[a-z][a-z-]+", code)
            if option and option.group() not in known:
                wrong.append(f"{page.name}: option {option.group()}")
        wrong += [
            f"{page.name}: {name}"
            for name in re.findall(r"\bHORO(?:VOD)?_[A-Z_]*[A-Z]\b", text)
            if name not in VARIABLES
        ]
        wrong += [f"{page.name}: hvd.{name}" for name in re.findall(r"\bhvd\.(\w+)", text) if not hasattr(hvd, name)]
    assert wrong == []


HPC = ROOT / "docs" / "how-to" / "hpc.md"


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    (recipe,) = (block.code for block in blocks_of(HPC) if block.code.startswith("Bootstrap: "))
    parts = re.split(r"^%(\w+)\n", recipe, flags=re.MULTILINE)
    assert re.fullmatch(r"Bootstrap: docker\nFrom: python:3\.\d+-slim-bookworm\n\n", parts[0])
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_image_has_what_the_build_and_slurm_need_and_its_last_command_succeeds(sections: dict[str, str]) -> None:
    (line,) = (line for line in sections["post"].splitlines() if "apt-get install" in line)
    packages = {word for word in line.partition(" install ")[2].split() if not word.startswith("-")}
    assert packages == {"gcc", "libc6-dev", "munge"}
    needed = (ROOT / ".ci" / "venv").read_text()
    assert "apt-get install gcc libc6-dev" in needed
    hororun = Path(sys.executable).parent / "hororun"
    command = sections["test"].strip().replace("hororun", str(hororun), 1)
    assert "[X] PyTorch" in start(["sh", "-c", command]).stdout


ORDER = """
import os
os.environ.update(HORO_OVERLAP="always")
if {split}:
    os.environ["HORO_HOST_ID"] = str(int(os.environ["HOROVOD_RANK"]) // 2)
import torch
import horo.torch as hvd

hvd.init()
assert hvd.cross_size() <= 2
torch.manual_seed(hvd.rank())
values = torch.randn(300_000)
alone = hvd.allreduce(values, op=hvd.Sum)
for count in (1, 1000, 100_003):  # where in a batch a value lies
    assert torch.equal(hvd.grouped_allreduce([torch.randn(count), values], op=hvd.Sum)[1], alone), count
for part in (slice(0, 1), slice(7, 5000)):
    assert torch.equal(hvd.allreduce(values[part], op=hvd.Sum), alone[part]), part
everyone = hvd.allgather(values[None])
total, second = everyone[0] + everyone[1], everyone[2] + everyone[3]
expected = total + second if {split} else total + everyone[2] + everyone[3]
assert torch.equal(alone, expected)
print("equal")
"""


@pytest.mark.parametrize("split", [False, True], ids=["one host", "two hosts"])
def test_contributions_are_added_in_the_order_of_ranks_on_each_host(tmp_path: Path, split: bool) -> None:
    path = tmp_path / "order.py"
    path.write_text(ORDER.format(split=split))
    assert forked(str(path), ranks=4) == [(0, "equal\n")] * 4


BATCHES, SAMPLES = 3, 4


def block_with(words: str, page: str) -> Block:
    (path,) = (path for path in HOW_TO if path.name == page)
    (block,) = (block for block in blocks_of(path) if words in block.code)
    return block


@pytest.fixture(scope="module")
def three() -> Iterator[RankPool]:
    """Three ranks: with two, a sum and a mean of the others' gradients are alike."""
    pool = RankPool(3)
    yield pool
    pool.close()


def train(code: object, api: Any, samples: slice) -> list[torch.Tensor]:
    """The parameters after the block, with these samples of each batch."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [(torch.randn(3 * SAMPLES, 4), torch.arange(3 * SAMPLES) % 2) for _ in range(BATCHES)]
        loader = [(inputs[samples], labels[samples]) for inputs, labels in batches]
        given = {"torch": torch, "nn": torch.nn, "hvd": api, "loader": loader, "model": model, "optimizer": optimizer}
        given["parameters"] = list(model.parameters())
        exec(code, given)
        return [parameter.detach() for parameter in given["model"].parameters()]
    finally:
        torch.set_default_dtype(torch.float32)


ALONE = SimpleNamespace(
    DistributedOptimizer=lambda optimizer, **_: optimizer,
    broadcast_parameters=lambda *_, **__: None,
    allgather=lambda tensor: tensor,
    rank=lambda: 0,
    size=lambda: 1,
    Sum=None,
)
"""What a recipe calls of horo, in a script for one process."""

WHOLE_LOSS = (
    ("* images @ gather(texts).T", "* gather(images) @ gather(texts).T"),
    ("* texts @ gather(images).T", "* gather(texts) @ gather(images).T"),
    (
        "labels = hvd.rank() * len(images) + torch.arange(len(images))",
        "labels = torch.arange(hvd.size() * len(images))",
    ),
)
"""Makes each rank compute the loss of all samples."""


@pytest.mark.parametrize(
    ("words", "changes"),
    [('reduction="sum"', ()), ("def gather(features)", ()), ("def gather(features)", WHOLE_LOSS)],
    ids=["sum", "contrastive", "contrastive, the whole loss on each rank"],
)
def test_a_recipe_steps_as_one_process_does(three: RankPool, words: str, changes: tuple[tuple[str, str], ...]) -> None:
    text = block_with(words, "recipes.md").code
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)

    def rank() -> list[torch.Tensor]:
        first = hvd.rank() * SAMPLES
        return train(text, hvd, slice(first, first + SAMPLES))

    wanted = train(text, ALONE, slice(None))
    for found in three.run(rank):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_job_goes_on_with_what_was_saved(three: RankPool, tmp_path: Path) -> None:
    save, load = (block_with(words, "checkpoints.md").code for words in ("def save(", "def load("))

    def prepare(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01 * seed), model)
        return {"torch": torch, "os": os, "hvd": hvd, "model": model, "optimizer": optimizer}

    def step(given: dict[str, Any]) -> None:
        given["optimizer"].zero_grad()
        given["model"](torch.arange(20.0).view(5, 4) ** (1 + hvd.rank())).square().mean().backward()
        given["optimizer"].step()

    def rank() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        os.chdir(tmp_path)
        first = prepare(1)
        step(first)
        exec(save, first)
        second = prepare(2 + hvd.rank())
        exec(load, second)
        assert second["epoch"] == 8
        step(first)
        step(second)
        os.chdir("/")
        return list(first["model"].state_dict().values()), list(second["model"].state_dict().values())

    for first, second in three.run(rank):
        torch.testing.assert_close(second, first, rtol=0, atol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_ranks_in_terminals_of_their_own_have_a_debugger(tmp_path: Path) -> None:
    code = block_with("MASTER_PORT", "questions.md").code
    code = code.replace("29500", str(port_for_later())).replace("python ", f"{sys.executable} ")
    (tmp_path / "train.py").write_text(
        "import torch, horo.torch as hvd\nhvd.init()\nif hvd.rank() == 0:\n    breakpoint()\n"
        "print('sum', hvd.allreduce(torch.tensor(hvd.rank() + 1), op=hvd.Sum).item())\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HORO", "SLURM_"))}
    ranks = [
        subprocess.Popen(
            ["sh", "-c", code.replace("RANK=0 LOCAL_RANK=0", f"RANK={rank} LOCAL_RANK={rank}")],
            cwd=tmp_path,
            env={**kept, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate("p 'rank', hvd.rank()\ncontinue\n", timeout=LIMIT_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert "('rank', 0)" in outputs[0]
    assert [output.splitlines()[-1].removeprefix("(Pdb) ") for output in outputs] == ["sum 3"] * 2


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


HERE = Path(__file__).parent
TRAINERS_PYTHON = ROOT / "build" / "trainers" / "bin" / "python"
TRAINERS_PAGE = ROOT / "docs" / "how-to" / "trainers.md"
NAMES = [block.mark.removeprefix("script=") for block in python_blocks(TRAINERS_PAGE) if block.mark]
IMPORTS_S = 280.0
"""A deadline for imports that take ten seconds, on a machine that does other things, too."""
# Ray uses these in processes that it starts.
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "200"}

needs_trainers = pytest.mark.skipif(
    not (TRAINERS_PYTHON.parents[1] / "installed").exists(),
    reason="build/trainers is not there (`make test-trainers` makes it)",
)


@needs_trainers
@pytest.mark.parametrize("name", NAMES)
def test_the_piece_trains_as_one_process_does(hororun: Hororun, tmp_path: Path, name: str) -> None:
    program = [str(TRAINERS_PYTHON), str(HERE / "trainer_rank.py"), name]
    modules = [str(HERE), os.environ.get("TRAINERS_PYTHONPATH", "")]
    offline = {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "MLFLOW_ALLOW_FILE_STORE": "true"}
    environment = {"TRAINERS_PYTHONPATH": os.pathsep.join(modules), **offline}
    if name == "ray":
        with tempfile.TemporaryDirectory(dir="/tmp") as short:  # the names of Ray's sockets are long
            job = hororun.launch(program, environment={**environment, **RAY, "RAY_TMPDIR": short}, cwd=tmp_path)
            done = job.finish(IMPORTS_S)
    else:
        words = ["-np", "2", "--no-prefix", *(["--no-torch-env"] if name.endswith("hvd") else []), *program]
        done = hororun.start(*words, environment=environment, cwd=tmp_path).finish(IMPORTS_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.splitlines().count("ok") == (1 if name == "ray" else 2), done.stdout
    written = {"transformers": "training_args.bin", "accelerate-hvd": "model.safetensors", "skorch-hvd": "params.pt"}
    if name in written:  # by rank 0
        assert [*(tmp_path / "out").rglob(written[name])], [*tmp_path.rglob("*")]
