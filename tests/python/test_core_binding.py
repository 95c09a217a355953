"""A source folder of horo on Python's path, or a damaged installation, is one sentence that says what to type."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SKIPPED = shutil.ignore_patterns("*.so", "__pycache__")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkout in which nothing is built."""
    shutil.copytree(ROOT / "horo", tmp_path / "source" / "horo", ignore=_SKIPPED)
    (tmp_path / "source" / "native").mkdir()
    shutil.copy(ROOT / "native" / "build.py", tmp_path / "source" / "native")
    return tmp_path / "source"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with an installed horo."""
    shutil.copytree(ROOT / "horo", tmp_path / "installed" / "horo")
    return tmp_path / "installed"


def last_line(words: list[str], *path: Path, folder: Path) -> str:
    """Of stderr of a Python with only these folders, and the libraries, on its path; it must fail."""
    libraries = [*map(str, path), *site.getsitepackages()]  # without -S they would bring this tree's own horo
    done = subprocess.run(
        [sys.executable, "-S", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(libraries)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("module", ["horo.torch", "horo.core.context", "horo.core.request_buffer"])
def test_a_source_folder_whose_extension_is_not_built_says_what_to_type(source: Path, module: str) -> None:
    code = f"import {module}\n" + ("horo.torch.init()" if module == "horo.torch" else "")
    line = last_line(["-c", code], folder=source)
    said = f"{source} holds horo's source, and its extension, the native core, is not built: pip install -e {source}"
    assert line == f"ImportError: {said}"


def test_a_source_folder_that_hides_an_installed_horo_says_so(source: Path, installed: Path) -> None:
    expected = (
        f"it hides the horo that is installed in {installed}; start from another folder and keep this one off "
        f"PYTHONPATH, or build it: pip install -e {source}"
    )
    assert last_line(["-c", "import horo.core.context"], installed, folder=source).endswith(expected)
    assert last_line(["-c", "import horo.core.context, sys; sys.exit('fine')"], source, folder=installed) == "fine"


def test_an_installation_without_its_extension_says_so(installed: Path, tmp_path: Path) -> None:
    next((installed / "horo").glob("_native*.so")).unlink()
    line = last_line(["-c", "import horo.core.context"], installed, folder=tmp_path)
    assert line == (
        f"ImportError: the horo in {installed / 'horo'} is not complete (horo._native is missing): "
        "pip install --force-reinstall horo-torch, or the path of its wheel or checkout"
    )


def test_other_modules_that_are_not_there_are_pythons_own_error(source: Path) -> None:
    line = last_line(["-c", "import horo.no_such_module"], folder=source)
    assert line == "ModuleNotFoundError: No module named 'horo.no_such_module'"
