"""What the pages tell a reader to type works: code runs, commands are understood, names exist, containers build."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from document_blocks import PAGES, Block, blocks_of, python_blocks, runs_here
from example_runs import ROOT, launcher, start

import horo.torch as hvd
from horo.config.table import GROUPS, names_of
from horo.runner.cli import parse
from horo.runner.cli.options import build_parser
from horo.runner.config import JobError

VARIABLES = [*names_of(*GROUPS), "HORO_HOST_MARK", "HORO_END"]
"""The last two are no settings: one marks the processes of a job for other processes, one is an event of a timeline."""

# fmt: off
FOREIGN_OPTIONS = {  # of srun and sbatch, mpirun and mpiexec, containers, torchrun
    "--mpi", "--cpus-per-task", "--cpu-bind", "--ntasks", "--ntasks-per-node", "--distribution", "--signal",
    "--requeue", "--kill-on-bad-exit", "--open-mode", "--time", "--bind-to", "--map-by", "--mca",
    "--allow-run-as-root", "--cleanenv", "--contain", "--bind", "--network", "--ipc", "--env",
    "--disable-auto-cleanup", "--rdzv-endpoint", "--master-addr", "--max-restarts", "--nnodes", "--pid", "--nv",
    "--fakeroot", "--no-capture-output", "--overlap", "--mem", "--smpiargs", "--gpus-per-task",
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


def test_blocks_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# a\n```python\nx = 1\n```\n* b\n\n  ```sh fragment\n  hororun -np 2 x\n  ```\n")
    assert blocks_of(page) == [
        Block(page, 3, "python", "", "x = 1\n"),
        Block(page, 8, "sh", "fragment", "hororun -np 2 x\n"),
    ]
    assert commands_of(page) == ["hororun -np 2 x"]


def test_python_blocks_run_on_two_ranks() -> None:
    blocks = [block for page in PAGES for block in python_blocks(page)]
    assert {block.mark.partition("=")[0] for block in blocks} <= {"", "script", "fragment"}
    for block in blocks:
        block.compiled()
    rank = str(Path(__file__).with_name("document_rank.py"))
    done = start([*launcher("hororun", 2), rank, *map(str, PAGES)])
    expected = sum(map(runs_here, blocks))
    assert expected >= 10
    assert done.stdout.splitlines()[-1] == f"{expected} blocks"


def script(name: str, folder: Path, page: str = "how-to/from-ddp.md") -> str:
    (block,) = (b for b in python_blocks(ROOT / "docs" / page) if b.mark == f"script={name}")
    path = folder / f"train_{name}.py"
    path.write_text(f"import os\nos.chdir({str(folder)!r})\n{block.code}")
    return str(path)


def test_the_script_with_ddp_and_the_one_with_horo_print_the_same_loss(tmp_path: Path) -> None:
    # On a busy machine torch now and then aborts at its end, after all is done: a thread of gloo's is still there.
    ddp = start([*launcher("torchrun", 2), script("ddp", tmp_path)], expected_code=None).stdout
    assert re.fullmatch(r"loss \d\.\d{6}\n", ddp)
    horo = start([*launcher("hororun", 2), script("horo", tmp_path)]).stdout
    assert re.fullmatch(r"loss \d\.\d{6}\n", horo)
    assert float(horo.split()[1]) == pytest.approx(float(ddp.split()[1]), abs=2e-6)


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
    known = {name for action in build_parser()._actions for name in action.option_strings} | FOREIGN_OPTIONS
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


def test_the_checkout_is_copied_and_installed(sections: dict[str, str]) -> None:
    assert set(sections) == {"files", "post", "test"}
    source, target = sections["files"].split()
    assert source == "."
    installed = [line.split() for line in sections["post"].splitlines() if "pip install" in line]
    assert [words[-2:] for words in installed] == [["torch", target]]


@pytest.mark.parametrize("name", ["post", "test"])
def test_commands_are_correct(sections: dict[str, str], name: str) -> None:
    done = subprocess.run(["sh", "-n"], input=sections[name], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_packages_are_those_that_the_build_and_slurm_need(sections: dict[str, str]) -> None:
    (line,) = (line for line in sections["post"].splitlines() if "apt-get install" in line)
    packages = {word for word in line.partition(" install ")[2].split() if not word.startswith("-")}
    assert packages == {"gcc", "libc6-dev", "munge"}
    needed = (ROOT / ".ci" / "venv").read_text()
    assert "apt-get install gcc libc6-dev" in needed


def test_what_the_image_runs_last_succeeds(sections: dict[str, str]) -> None:
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
    assert start([*launcher("hororun", 4), str(path)]).stdout.splitlines() == ["equal"] * 4
