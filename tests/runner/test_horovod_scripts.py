"""Scripts that import horovod run with horo: hororun --horovod, horovodrun, python -m horo.horovod."""

import ast
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from jobs import IMPORT_TORCH_SILENTLY, TORCH_S, Hororun, run_python
from parsing import parsed

from horo.config.ignored import passed_over
from horo.config.sources import encode_sources
from horo.horovod.environment import is_switched_on, with_horovod
from horo.runner.cli import parse
from horo.runner.config import JobError
from horo.runner.job import external_launcher
from horo.runner.job.forwarded_variables import forwarded

OLD_SCRIPT = """
import sys
import warnings
import horovod
import horovod.torch as hvd
import horo.torch
import torch
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.util import gloo_built
from horovod.common.elastic import ObjectState
from horovod.torch.compression import Compression
from horovod.torch.elastic import run
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState
from horovod.torch.mpi_ops import allreduce_async, synchronize

assert ElasticSampler is hvd.elastic.ElasticSampler and issubclass(TorchState, ObjectState) and run is hvd.elastic.run
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
print([str(each.message).split(". This")[0] for each in caught])
total = synchronize(allreduce_async(torch.ones(1), op=hvd.Sum))
print(hvd.gloo_built(), gloo_built(), hvd.gloo_enabled(), total.item(), sys.argv[1:])
"""
PRINTED = [
    "['optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize()']",
    "True True True 2.0 ['5']",
]
FAKE = "__version__ = 'another'\nprint('the Horovod that is installed')\n"


@pytest.fixture
def old_script(tmp_path: Path) -> str:
    """A script of Horovod's kind, by its name, and a Horovod that PYTHONPATH finds."""
    (tmp_path / "old.py").write_text(IMPORT_TORCH_SILENTLY + OLD_SCRIPT)
    (tmp_path / "installed" / "horovod").mkdir(parents=True)
    (tmp_path / "installed" / "horovod" / "__init__.py").write_text(FAKE)
    return "old.py"


def in_front(folder: Path) -> str:
    """A PYTHONPATH with a folder in front of what leads to tests/startup."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


SHORT_SCRIPT = "import sys, horovod; sys.stdout.write(f'{horovod.__version__} {sys.argv[1:]}\\n')"


@pytest.mark.parametrize(
    ("where", "command"),
    [("localhost:8", ["old.py"]), ("one:2,two:2", [sys.executable, "short.py"])],
    ids=["direct-script", "agents-python"],
)
def test_a_script_of_horovods_runs_unchanged(
    hororun: Hororun, where: str, command: list[str], old_script: str, tmp_path: Path
) -> None:
    (tmp_path / "short.py").write_text(SHORT_SCRIPT)
    words = ["--horovod", "--no-prefix", "-np", "2", *command, "5"]
    environment = {"PYTHONPATH": in_front(tmp_path / "installed")}
    done = hororun.start(*words, where=where, cwd=tmp_path, environment=environment).finish(TORCH_S)
    expected = PRINTED
    if command[-1] == "short.py":  # which says that it has not called init()
        expected = ["0.28.1 ['5']"]
    else:
        assert done.stderr == ""
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(2 * expected)


def test_this_host_takes_any_number_of_ranks_and_lines_begin_as_with_horovod(hororun: Hororun) -> None:
    size = str((os.cpu_count() or 1) + 1)
    words = ["-np", size, "--no-prefix", "printenv", "HOROVOD_SIZE"]
    done = hororun.launch([sys.executable, "-m", "horo.runner", "--horovod", *words]).finish()
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{size}\n" * int(size), "")
    for before, environment, expected in (
        (["--horovod"], {}, True),
        ([], {"HORO_HOROVOD": "1"}, True),
        ([], {}, False),
        (["--horovod", "-H", "localhost:1"], {}, False),
    ):
        job = parsed([*before, *words], environment={"PATH": os.environ["PATH"], **environment})
        assert job.oversubscribe is expected
    words = ["-np", "1", "sh", "-c", "echo out; echo err >&2"]
    for before, environment in ((["--horovod"], {}), ([], {"HORO_HOROVOD": "1"})):
        done = hororun.run(*before, *words, environment=environment)
        assert (done.stdout, done.stderr) == ("[0]<stdout>:out\n", "[0]<stderr>:err\n")
    done = hororun.run("--horovod", "--no-prefix", *words)
    assert (done.stdout, done.stderr) == ("out\n", "err\n")


def test_without_the_option_horovod_is_what_is_installed(hororun: Hororun, tmp_path: Path, old_script: str) -> None:
    (tmp_path / "train.py").write_text("import horovod\n")
    environment = {"PYTHONPATH": str(tmp_path / "installed")}
    done = hororun.run("-np", "1", "--no-prefix", "train.py", cwd=tmp_path, environment=environment)
    assert done.stdout == "the Horovod that is installed\n"


@pytest.mark.usefixtures("old_script")
def test_python_m_horo_horovod(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(SHORT_SCRIPT)
    for form in (["short.py"], ["-m", "short"]):
        words = ["-m", "horo.horovod", *form, "--lr", "1"]
        done = run_python(*words, cwd=tmp_path, environment={"PYTHONPATH": in_front(tmp_path / "installed")})
        assert (done.returncode, done.stdout, done.stderr) == (0, "0.28.1 ['--lr', '1']\n", "")


FLAGS = [
    (["-u", "-m", "horo.horovod"], ["-u"]),
    (["-um", "horo.horovod"], ["-u"]),
    (["-Wignore", "-X", "dev", "-OO", "-mhoro.horovod"], ["-Wignore", "-X", "dev", "-OO"]),
    (["-m", "horo.horovod"], []),
]


@pytest.mark.parametrize(("before", "kept"), FLAGS, ids=[" ".join(before) for before, _ in FLAGS])
def test_options_of_python_are_those_of_the_script(before: list[str], kept: list[str], tmp_path: Path) -> None:
    code = "import sys; print(sys.orig_argv[1:-4], sys.argv[1:])"
    done = run_python(*before, "-c", code, "-m", "x", cwd=tmp_path)
    assert (done.stdout, done.stderr) == (f"{kept} ['-m', 'x']\n", "")


def test_python_m_horo_horovod_says_how_it_is_used(tmp_path: Path) -> None:
    shown = run_python("-m", "horo.horovod", "--help", cwd=tmp_path)
    assert shown.returncode == 0
    assert shown.stdout.startswith("usage: python -m horo.horovod train.py")
    done = run_python("-m", "horo.horovod", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, shown.stdout)
    ignoring = run_python("-E", "-m", "horo.horovod", "old.py", cwd=tmp_path)
    assert (ignoring.returncode, ignoring.stderr) == (
        2,
        "horo.horovod: this Python ignores PYTHONPATH (-I, -E): leave that out\n",
    )


MISSING = [
    ("import horovod.tensorflow", "No module named 'horovod.tensorflow'"),
    ("from horovod.common.elastic import run_fn", "cannot import name 'run_fn'"),
    ("import horovod.runner.elastic.worker", "No module named 'horovod.runner.elastic'"),
    ("import horovod.torch.nothing", "No module named 'horovod.torch.nothing'"),
]


def test_a_horovod_that_is_imported_stays(tmp_path: Path, old_script: str) -> None:
    code = (
        "import horovod, horo.horovod\n"
        "try:\n    horo.horovod.install()\nexcept ImportError as error:\n    print(error)\n"
        "print(horo.horovod.is_installed())"
    )
    done = run_python("-c", code, cwd=tmp_path, environment={"PYTHONPATH": str(tmp_path / "installed")})
    _said, error, installed = done.stdout.splitlines()
    assert error.startswith("horovod is imported already, from ")
    assert installed == "False"


BY_A_CALL = """
import subprocess, sys, horo, horo.horovod as h
h.install(); h.install()
import horovod, horovod.common.util as u
from horovod.runner import run
from importlib.util import find_spec
print(u.num_rank_is_power_2(6), horovod.run is horo.run is run, find_spec("horovod.keras"), flush=True)
subprocess.run([sys.executable, "-c", "import horovod; print(horovod.__version__)"])
"""


def test_the_names_can_be_had_by_a_call_and_in_what_the_script_starts(tmp_path: Path) -> None:
    assert run_python("-c", BY_A_CALL, cwd=tmp_path).stdout == "False True None\n0.28.1\n"


UTIL = """
import os, warnings
import horovod.torch as hvd
import torch
from horovod.common import util
from horovod.torch.compression import Compressor, FP16Compressor, NoneCompressor
from horovod.torch.functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from horovod.torch.mpi_ops import allreduce, allreduce_async_, is_homogeneous, poll, synchronize
from horovod.torch.mpi_ops import add_process_set, remove_process_set
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm
from horovod.common.process_sets import ProcessSet, global_process_set

assert hvd.add_process_set is add_process_set and hvd.remove_process_set is remove_process_set
assert hvd.SyncBatchNorm is SyncBatchNorm and hvd.broadcast_object is broadcast_object
assert hvd.DistributedOptimizer is DistributedOptimizer and hvd.Compression.fp16 is FP16Compressor
assert hvd.ProcessSet is ProcessSet and hvd.global_process_set is global_process_set
assert util.split_list(list(range(7)), 3) == [[0, 1, 2], [3, 4], [5, 6]] and util.split_list([1], 2) == [[1], []]
assert util.is_iterable("a") and not util.is_iterable(1)
assert util.gpu_available("torch") == torch.cuda.is_available()
assert util.extension_available("torch") and not util.extension_available("tensorflow", verbose=True)
assert util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", "file", "mpi_lib_v2") is None
os.environ["GONE"] = "before"
with util.env(GONE=None, NEW="1"):
    assert "GONE" not in os.environ and os.environ["NEW"] == "1"
assert os.environ["GONE"] == "before" and "NEW" not in os.environ
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    assert util.get_average_backwards_compatibility_fun(hvd)(None, False) == hvd.Sum
print(len(seen), util.num_rank_is_power_2(8), util.check_num_rank_power_of_2(0))
"""


def test_what_scripts_import_from_the_modules_of_horovod_is_there_or_an_import_error(tmp_path: Path) -> None:
    tries = [f"try:\n    {line}\nexcept ImportError as error:\n    print(repr(str(error)))\n" for line, _ in MISSING]
    done = run_python("-m", "horo.horovod", "-c", IMPORT_TORCH_SILENTLY + UTIL + "".join(tries), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    first, *others = done.stdout.splitlines()
    assert first == "1 True False"
    for said, (_, text) in zip(map(ast.literal_eval, others), MISSING, strict=True):
        assert said.startswith(text)


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
    job = parsed(["--horovod", "--mpi", "-np", "2", "-H", "a:1,b:1", "cmd"])
    told = external_launcher._environment(job, os.environ, 1)
    assert Path(told["PYTHONPATH"], "horovod.py").is_file()
    assert forwarded({"PYTHONPATH": "x", "HORO_HOROVOD": "1"}).keys() == {"PYTHONPATH", "HORO_HOROVOD"}


def test_what_does_nothing_is_told_of_arguments_too() -> None:
    off = {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "5"}
    assert passed_over(off, {"stall_check_disable": False}) == []
    assert passed_over({}, {"stall_check_disable": True, "stall_shutdown_time_s": 5}) == [
        "init(stall_shutdown_time_s=5) does nothing beside init(stall_check_disable=True)"
    ]
    assert passed_over(off, {"stall_check_disable": None, "stall_check_time_s": 5}) == [
        "init(stall_check_time_s=5) does nothing beside HOROVOD_STALL_CHECK_DISABLE=1"
    ]
    log = {"HOROVOD_AUTOTUNE_LOG": "a.csv"}
    assert passed_over(log, {"autotune": True}) == []
    assert passed_over({**log, "HORO_AUTOTUNE": "1"}, {"autotune": False}) == [
        "HOROVOD_AUTOTUNE_LOG does nothing without init(autotune=True)"
    ]
    option = {**log, **encode_sources(log, {"HOROVOD_AUTOTUNE_LOG": "hororun --autotune-log-file"})}
    assert passed_over(option) == ["hororun --autotune-log-file does nothing without --autotune"]
    assert passed_over(option, {"autotune": False}) == ["HOROVOD_AUTOTUNE_LOG does nothing without init(autotune=True)"]
    assert passed_over({**option, "HORO_AUTOTUNE": "1"}) == []
    assert passed_over({}, {"autotune_max_samples": 9}) == [
        "init(autotune_max_samples=9) does nothing without init(autotune=True)"
    ]


def test_rank_0_names_them_at_the_start(hororun: Hororun, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from horo.bootstrap.job import start\nstart().close()\n")
    done = hororun.run("-np", "2", "train.py", cwd=tmp_path, environment={"HOROVOD_LOG_HIDE_TIME": "1"})
    assert done.stderr == ("[0] horo [0] warning: HOROVOD_LOG_HIDE_TIME does nothing here: horo's log has no times\n")


def test_horovodrun_is_installed_and_is_hororun_for_horovod(tmp_path: Path) -> None:
    (command,) = entry_points(group="console_scripts", name="horovodrun")
    assert command.value == "horo.runner.cli:main_for_horovod"
    code = "import sys; from horo.runner.cli import main_for_horovod; sys.exit(main_for_horovod())"
    passed_over = ["--disable-cache", "--autotune-gaussian-process-noise", "1"]
    done = run_python("-c", code, "-np", "1", "--no-prefix", *passed_over, "printenv", "HORO_HOROVOD", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr.splitlines() == [
        "hororun: warning: --disable-cache does nothing here: hororun keeps no cache of earlier checks",
        "hororun: warning: --autotune-gaussian-process-noise does nothing here: horo's search has no Gaussian process",
    ]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--mpi-args=-v", "started by ssh"), ("--binding-args=-v", "started by ssh"), ("--tcp", "started by ssh"),
        ("-p 22", "no remote hosts"), ("--ssh-identity-file key", "no remote hosts"),
        ("--gloo --mpi-args=-v", "started by ssh"),
    ],
)  # fmt: skip
def test_an_option_for_another_job_is_passed_over(words: str, reason: str) -> None:
    """Horovod takes it without a word."""
    with pytest.raises(JobError):
        parse([*words.split(), "-np", "2", "cmd"])
    job = parsed(["--horovod", *words.split(), "-np", "2", "cmd"])
    (sentence,) = job.passed_over
    assert " does nothing here: " in sentence
    assert reason in sentence
    fitting = parsed(["--horovod", "-H", "a:2", "-p", "22", "--mpi-args=-v", "--mpi", "-np", "2", "cmd"])
    assert fitting.passed_over == ()


pytest.importorskip("torch")

DIGITS = """
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import torch.utils.data.distributed

import horovod
import horovod.torch as hvd

def main(factor):
    def train(epoch):
        train_sampler.set_epoch(epoch)
        for batch_idx, (data, target) in enumerate(train_loader):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.nll_loss(model(data).float(), target)
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()

    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    target = torch.arange(120) % 10
    dataset = torch.utils.data.TensorDataset(torch.eye(10)[target].repeat(1, 7)[:, :64].reshape(-1, 1, 8, 8), target)
    train_sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = torch.utils.data.DataLoader(dataset, batch_size=10, sampler=train_sampler)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10), nn.LogSoftmax(dim=1))
    optimizer = optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average,
                                         compression=hvd.Compression.fp16, gradient_predivide_factor=factor)
    scales = hasattr(torch.amp, "GradScaler")  # for the CPU: from torch 2.3 on
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scales else torch.cuda.amp.GradScaler(enabled=False)
    for epoch in range(1, 7):
        train(epoch)
    model.eval()
    correct = torch.stack([model(data).argmax(1).eq(target).sum() for data, target in train_loader]).sum() / 60.0
    accuracy = hvd.allreduce(correct, name="avg_accuracy").item()
    if hvd.rank() == 0:
        print("accuracy %.0f%%" % (100.0 * accuracy))

if __name__ == "__main__":
    horovod.run(main, args=(2.0,), np=2)
"""


def test_digits(hororun: Hororun, tmp_path: Path) -> None:
    """A script of Horovod's shape, which starts its own ranks."""
    (tmp_path / "script.py").write_text(IMPORT_TORCH_SILENTLY + DIGITS)
    done = hororun.launch([sys.executable, "-m", "horo.horovod", "script.py"], cwd=tmp_path).finish(TORCH_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0]<stdout>:accuracy 100%\n", "")
