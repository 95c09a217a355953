"""hororun runs no module that lies in the directory it is called from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from jobs import Hororun, make_remote_shell

NAMES = ("json", "secrets", "argparse", "selectors", "shlex", "subprocess", "hmac", "struct", "random", "socket", "pwd")


def plant(folder: Path) -> Path:
    """Modules that write a file when they are imported; returns that file."""
    ran = folder / "ran"
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write({name!r} + ' ')\nraise SystemExit(77)\n")
    return ran


@pytest.mark.parametrize("module", ["horo", "horo.runner"])
@pytest.mark.parametrize("words", [["--version"], ["-np", "1", "-H", "localhost:1", "true"]], ids=["version", "job"])
def test_modules_in_the_current_directory_are_not_imported(tmp_path: Path, module: str, words: list[str]) -> None:
    ran = plant(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", module, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
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
            [*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.stdout == "imported\n", done.stderr
