"""Scripts that import horovod run with horo: hororun --horovod, horovodrun, python -m horo.horovod."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from jobs import DEADLINE_S, TORCH_S, Hororun

from horo._config import GROUPS, names_of, read_config
from horo._passed_over import PASSED_OVER, passed_over
from horo.horovod.environment import is_switched_on, with_horovod
from horo.runner.cli import parse
from horo.runner.cli.options import _REFUSED
from horo.runner.job import external_launcher
from horo.runner.job.environment import forwarded

OLD_SCRIPT = """
import sys
import warnings
import horovod
import horovod.torch as hvd
import horo.torch
import torch
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.util import gloo_built
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import allreduce_async, synchronize

assert hvd is horo.torch and horovod.torch is hvd and Compression is hvd.Compression
assert horovod.__version__ == "0.28.1" and HorovodInternalError is hvd.HorovodInternalError
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
model(torch.randn(4, 3)).sum().backward()
optimizer.synchronize()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optimizer.step()
print([str(each.message).split(";")[0] for each in caught])
total = synchronize(allreduce_async(torch.ones(1), op=hvd.Sum))
print(hvd.gloo_built(), gloo_built(), hvd.gloo_enabled(), total.item(), sys.argv[1:])
"""
PRINTED = [
    "['optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize()']",
    "True True True {size}.0 {arguments}",
]
FAKE = "__version__ = 'another'\nprint('the Horovod that is installed')\n"


@pytest.fixture
def old_script(tmp_path: Path) -> str:
    """A script of Horovod's kind, by its name, and a Horovod that PYTHONPATH finds."""
    (tmp_path / "old.py").write_text(OLD_SCRIPT)
    (tmp_path / "installed" / "horovod").mkdir(parents=True)
    (tmp_path / "installed" / "horovod" / "__init__.py").write_text(FAKE)
    return "old.py"


def run_python(words: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=TORCH_S,
    )


@pytest.mark.parametrize("command", [["old.py"], [sys.executable, "old.py"]], ids=["script", "python"])
def test_a_script_of_horovods_runs_unchanged(
    hororun: Hororun, where: str, command: list[str], old_script: str, tmp_path: Path
) -> None:
    installed = str(tmp_path / "installed")
    words = ["--horovod", "--no-prefix", "-np", "2", *command, "5"]
    done = hororun.start(*words, where=where, cwd=tmp_path, environment={"PYTHONPATH": installed}).finish(TORCH_S)
    assert (done.returncode, done.stderr) == (0, "")
    expected = [line.format(size=2, arguments=["5"]) for line in PRINTED]
    assert sorted(done.stdout.splitlines()) == sorted(2 * expected)


def test_without_the_option_horovod_is_what_is_installed(hororun: Hororun, tmp_path: Path, old_script: str) -> None:
    (tmp_path / "train.py").write_text("import horovod\n")
    environment = {"PYTHONPATH": str(tmp_path / "installed")}
    done = hororun.run("-np", "1", "--no-prefix", "train.py", cwd=tmp_path, environment=environment)
    assert done.stdout == "the Horovod that is installed\n"


@pytest.mark.parametrize("form", [["old.py"], ["-m", "old"]], ids=" ".join)
def test_python_m_horo_horovod(form: list[str], old_script: str, tmp_path: Path) -> None:
    done = run_python(["-m", "horo.horovod", *form, "--lr", "1"], tmp_path, PYTHONPATH=str(tmp_path / "installed"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [line.format(size=1, arguments=["--lr", "1"]) for line in PRINTED]


def test_python_m_horo_horovod_says_how_it_is_used(tmp_path: Path) -> None:
    shown = run_python(["-m", "horo.horovod", "--help"], tmp_path)
    assert shown.returncode == 0
    assert shown.stdout.startswith("usage: python -m horo.horovod train.py")
    done = run_python(["-m", "horo.horovod"], tmp_path)
    assert (done.returncode, done.stderr) == (2, shown.stdout)
    ignoring = run_python(["-E", "-m", "horo.horovod", "old.py"], tmp_path)
    assert (ignoring.returncode, ignoring.stderr) == (
        2,
        "horo.horovod: this Python ignores PYTHONPATH (-I, -E): leave that out\n",
    )


def test_a_python_that_the_script_starts_has_the_names_too(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import horovod; print(horovod.__version__)'])"
    )
    done = run_python(["-m", "horo.horovod", "-c", code], tmp_path)
    assert (done.stdout, done.stderr) == ("0.28.1\n", "")


MISSING = [
    ("import horovod.tensorflow", "No module named 'horovod.tensorflow'"),
    ("from horovod.torch import elastic", "horovod.torch has 'elastic'; this version of horo does not have it"),
    ("import horovod.torch.nothing", "No module named 'horovod.torch.nothing'"),
]


@pytest.mark.parametrize(("line", "text"), MISSING, ids=[line for line, _ in MISSING])
def test_what_is_missing_is_an_import_error(line: str, text: str, tmp_path: Path) -> None:
    code = f"try:\n    {line}\nexcept ImportError as error:\n    print(error)"
    done = run_python(["-m", "horo.horovod", "-c", code], tmp_path)
    assert done.stdout.startswith(text)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_horovod_that_is_imported_stays(tmp_path: Path, old_script: str) -> None:
    code = (
        "import horovod, horo.horovod\n"
        "try:\n    horo.horovod.install()\nexcept ImportError as error:\n    print(error)\n"
        "print(horo.horovod.is_installed())"
    )
    done = run_python(["-c", code], tmp_path, PYTHONPATH=str(tmp_path / "installed"))
    _said, error, installed = done.stdout.splitlines()
    assert error.startswith("horovod is imported already, from ")
    assert installed == "False"


def test_horovod_run_is_horo_run(tmp_path: Path) -> None:
    code = "import horo, horovod; from horovod.runner import run; print(horovod.run is horo.run is run)"
    assert run_python(["-m", "horo.horovod", "-c", code], tmp_path).stdout == "True\n"


def test_the_names_can_be_had_by_a_call(tmp_path: Path) -> None:
    use = "import horovod.common.util as u; print(u.num_rank_is_power_2(6))"
    code = f"import horo.horovod as h; h.install(); h.install(); {use}"
    assert run_python(["-c", code], tmp_path).stdout == "False\n"


def test_a_module_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    code = "import horo.horovod as h; h.install(); from importlib.util import find_spec as f; print(f('horovod.keras'))"
    assert run_python(["-c", code], tmp_path).stdout == "None\n"


def test_what_is_started_after_the_call_has_the_names_too(tmp_path: Path) -> None:
    child = "subprocess.run([sys.executable, '-c', 'import horovod; print(horovod.__version__)'])"
    code = f"import subprocess, sys, horo.horovod as h; h.install(); {child}"
    assert run_python(["-c", code], tmp_path).stdout == "0.28.1\n"


def test_pythonpath_keeps_its_folders() -> None:
    changed = with_horovod({"PYTHONPATH": "/a::/b", "X": "1"})
    own, *others = changed.pop("PYTHONPATH").split(":")
    assert Path(own, "horovod.py").is_file()
    assert others == ["/a", "/b"]
    assert changed == {"X": "1", "HORO_HOROVOD": "1"}
    twice = with_horovod(with_horovod({}))
    assert twice["PYTHONPATH"] == own
    assert is_switched_on(twice)
    assert not is_switched_on({"HORO_HOROVOD": "perhaps"})


def test_mpirun_passes_the_names_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    job = parse(["--horovod", "--mpi", "-np", "2", "-H", "a:1,b:1", "cmd"])
    assert job is not None
    told = external_launcher._environment(job, os.environ, 1)
    assert Path(told["PYTHONPATH"], "horovod.py").is_file()
    assert forwarded({"PYTHONPATH": "x", "HORO_HOROVOD": "1"}).keys() == {"PYTHONPATH", "HORO_HOROVOD"}


def test_variables_that_do_nothing_are_named() -> None:
    assert passed_over({"HOROVOD_AUTOTUNE": "1", "HOROVOD_ELASTIC": "0", "HOROVOD_CYCLE_TIME": "1"}) == [
        "HOROVOD_AUTOTUNE does nothing here: this version of horo has no autotuner"
    ]
    assert not names_of(*GROUPS) & PASSED_OVER.keys()


def test_times_of_stall_checks_that_are_off_are_named() -> None:
    times = {"HORO_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9"}
    assert passed_over(times | {"HOROVOD_STALL_CHECK_DISABLE": "0"}) == []
    assert passed_over(times | {"HOROVOD_STALL_CHECK_DISABLE": "1"}) == [
        "HORO_STALL_CHECK_TIME_SECONDS does nothing beside HOROVOD_STALL_CHECK_DISABLE=1",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS does nothing beside HOROVOD_STALL_CHECK_DISABLE=1",
    ]


def test_rank_0_names_them_at_the_start(hororun: Hororun, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from horo._bootstrap.job import start\nstart().close()\n")
    done = hororun.run("-np", "2", "train.py", cwd=tmp_path, environment={"HOROVOD_TIMELINE": "/tmp/x"})
    assert done.stderr == (
        "[0] horo [0] warning: HOROVOD_TIMELINE does nothing here: this version of horo has no timeline\n"
    )


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "backward"),
        ({"HORO_HOROVOD": "1"}, "step"),
        ({"HORO_HOROVOD": "1", "HORO_GRADIENTS_READY": "backward"}, "backward"),
    ],
)
def test_horovods_order_of_calls_is_the_default_there(environment: dict[str, str], expected: str) -> None:
    assert read_config(environment).gradients_ready_default == expected


def test_horovodrun_is_installed_and_is_hororun_for_horovod(tmp_path: Path) -> None:
    (command,) = entry_points(group="console_scripts", name="horovodrun")
    assert command.value == "horo.runner.cli:main_for_horovod"
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from horo.runner.cli import main_for_horovod; sys.exit(main_for_horovod())",
         "-np", "1", "--no-prefix", "--disable-cache", "--autotune-log-file", "x", "printenv", "HORO_HOROVOD"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=DEADLINE_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr.splitlines() == [
        "hororun: warning: --disable-cache does nothing here: hororun keeps no cache of earlier checks",
        "hororun: warning: --autotune-log-file does nothing here: autotuning, which is not in this version of horo",
    ]


ESSENTIAL = {"--timeline-filename", "--timeline-mark-cycles", "--no-timeline-mark-cycles"}


@pytest.mark.parametrize("option", _REFUSED)
def test_an_option_that_only_tunes_horovod_is_passed_over(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    values, reason = _REFUSED[option]
    words = [option, *("1" * values), "-np", "2", "cmd"]
    with pytest.raises(SystemExit):
        parse(words)
    assert f"hororun: {option}: {reason}" in capsys.readouterr().err
    if option in ESSENTIAL or reason.startswith("an elastic job"):
        with pytest.raises(SystemExit):
            parse(words, for_horovod=True)
    else:
        job = parse(["--horovod", *words])
        assert job is not None
        (sentence,) = job.passed_over
        assert sentence.startswith(f"{option} does nothing here: ")
