"""What lies where hororun is called is not run, and a secret is in no ``repr``, which ends in logs and tracebacks."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from jobs import Hororun, make_remote_shell

import horo.bootstrap
import horo.runner
from horo.bootstrap.auth.handshake import Acceptor, Claim, HandshakeResult, Purpose
from horo.bootstrap.launchers.slurm_store import _StoreInfo
from horo.bootstrap.net.addresses import Endpoint
from horo.bootstrap.net.dial import _Attempt
from horo.runner.agent.protocol import Kind, Message
from horo.runner.job.external_launcher import _Plan

NAMES = ("json", "secrets", "argparse", "selectors", "shlex", "subprocess", "hmac", "struct", "random", "socket", "pwd")


def plant(folder: Path, names: Sequence[str] = NAMES) -> Path:
    """Modules that write a file when they are imported; returns that file."""
    ran = folder / "ran"
    for name in names:
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write({name!r} + ' ')\nraise SystemExit(77)\n")
    return ran


ALL = sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))


@pytest.mark.parametrize(
    ("module", "option"),
    [("horo", "-m"), ("horo.runner", "-m"), ("horo.timeline", "-m"), ("horo.horovod", "-Im"), ("horo.runner", "-um")],
)
def test_no_command_imports_any_module_of_that_name(tmp_path: Path, module: str, option: str) -> None:
    ran = plant(tmp_path, (*ALL, "__future__"))
    command = [sys.executable, f"{option}{module}" if option == "-um" else option, *[module] * (option != "-um"), "-h"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, ran.exists()) == (0, False), done.stderr


def test_a_function_of_horo_run_finds_what_lies_beside_its_script(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def rank():\n    return 7\n")
    (tmp_path / "train.py").write_text(
        "import beside, horo\nif __name__ == '__main__':\n    print(horo.run(beside.rank, np=1))\n"
    )
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "[7]\n", done.stderr


def test_a_job_imports_no_modules_of_the_current_directory(tmp_path: Path) -> None:
    ran = plant(tmp_path)
    command = [sys.executable, "-m", "horo", "-np", "1", "-H", "localhost:1", "true"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, ran.exists()) == (0, False), done.stderr


def test_agents_do_not_import_from_it_either(tmp_path: Path) -> None:
    ran = plant(tmp_path)
    (tmp_path / "shell").mkdir()
    runner = Hororun(make_remote_shell(tmp_path / "shell"))
    try:
        done = runner.run("-np", "2", "true", where="one:1,two:1", cwd=tmp_path)
    finally:
        runner.clean_up()
    assert (done.returncode, ran.exists()) == (0, False), done.stderr


def test_a_script_still_imports_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "train.py").write_text("import beside\nimport os\nos.write(1, b'imported\\n')\n")
    command = [sys.executable, "-m", "horo.runner", "-np", "1", "-H", "localhost:1", "--no-prefix"]
    for words in (["train.py"], ["-m", "train"]):
        done = subprocess.run(
            [*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )  # fmt: skip
        assert done.stdout == "imported\n", done.stderr


SECRET = b"do not show this"
CLAIM = Claim(Purpose.STORE)
SAID = re.compile("|".join(re.escape(text) for text in (SECRET.decode(), SECRET.hex(), repr(SECRET)[2:-1])))


@pytest.mark.parametrize(
    "holder",
    [
        HandshakeResult(CLAIM, SECRET, SECRET),
        Acceptor(SECRET),
        _Attempt(SECRET, CLAIM, 0.0, {}),
        _StoreInfo("job/1", [Endpoint("10.0.0.1", 4711)], SECRET),
        _Plan("mpirun", ["mpirun"], {"HORO_SECRET": SECRET.hex()}),
        Message(Kind.JOB, 0, json.dumps({"environment": {"HORO_SECRET": SECRET.hex()}}).encode()),
    ],
    ids=lambda holder: type(holder).__name__,
)
def test_a_repr_does_not_show_the_secret(holder: object) -> None:
    for shown in (repr(holder), str(holder), f"{[holder]}"):
        assert type(holder).__name__ in shown
        assert not SAID.search(shown)


def fields_in_a_repr() -> Iterator[str]:
    for package in (horo.bootstrap, horo.runner):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for module_name, module_object in list(sys.modules.items()):
        if not module_name.startswith("horo."):
            continue
        for each in vars(module_object).values():
            if inspect.isclass(each) and dataclasses.is_dataclass(each):
                yield from (f"{each.__name__}.{field.name}" for field in dataclasses.fields(each) if field.repr)
            elif inspect.isclass(each) and issubclass(each, tuple) and "__repr__" not in vars(each):
                yield from (f"{each.__name__}.{name}" for name in getattr(each, "_fields", ()))


def test_no_field_that_is_named_for_a_secret_is_in_a_repr() -> None:
    shown = set(fields_in_a_repr())
    assert "HandshakeResult.claim" in shown
    secret = re.compile(r".*\.(\w*secret|\w+_key|key|environment|token)")
    # of Variable: whether a variable is one; of Option: its key in a configuration file
    assert {name for name in shown if secret.fullmatch(name)} - {"Variable.secret", "Option.key"} == set()
