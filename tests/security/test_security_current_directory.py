"""hororun runs no module that lies in the directory it is called from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from jobs import Hororun, make_remote_shell

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
