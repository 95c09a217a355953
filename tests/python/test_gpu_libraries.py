"""What a process has of libraries for GPUs, shown with doubles of them: no GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from doubles import CUDA, NCCL, build_double

from horo.bootstrap.gpu_libraries import nccl_places

TOLD = "import horo.torch as hvd; print(hvd.cuda_built(), hvd.nccl_built())"
FOUND = "from horo.bootstrap.gpu_libraries import find_cuda, find_nccl; find_cuda(); print(find_nccl().version)"


def with_libraries(*folders: Path, packages: Path | None = None) -> dict[str, str]:
    """An environment whose loader finds libraries in ``folders``, and whose Python finds ``packages``."""
    added = {"LD_LIBRARY_PATH": ":".join(map(str, folders))}
    if packages is not None:
        added["PYTHONPATH"] = str(packages)
    return {**os.environ, **added}


def run(*words: str, env: Mapping[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *words], env=dict(env), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0 or "--check-build" in words, done.stderr
    return done.stdout


def line_of(shown: str, what: str) -> str:
    (line,) = (line for line in shown.splitlines() if what in line)
    return line.strip()


without_own_nccl = pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="this torch is built for CUDA and has loaded an NCCL of its own: a build for CPUs has none",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both libraries on the system."""
    found = tmp_path_factory.mktemp("system")
    build_double(CUDA, found)
    build_double(NCCL, found)
    return found


@without_own_nccl
def test_the_systems_libraries_are_found(folder: Path) -> None:
    assert run("-c", TOLD, env=with_libraries(folder)) == "True 22304\n"


def test_nccl_of_a_python_package_goes_before_the_systems(folder: Path, tmp_path: Path) -> None:
    build_double(NCCL, tmp_path / "nvidia" / "nccl" / "lib", VERSION=22703)
    assert run("-c", FOUND, env=with_libraries(folder, packages=tmp_path)) == "22703\n"


def test_nccl_that_torch_has_loaded_goes_before_all(folder: Path, tmp_path: Path) -> None:
    build_double(NCCL, tmp_path / "nvidia" / "nccl" / "lib", VERSION=22703)
    loaded = build_double(NCCL, tmp_path / "loaded", VERSION=22105)
    code = f"import ctypes; ctypes.CDLL({str(loaded)!r}); {FOUND}"
    assert run("-c", code, env=with_libraries(folder, packages=tmp_path)) == "22105\n"


def test_asking_does_not_initialize_the_driver(tmp_path: Path) -> None:
    build_double(CUDA, tmp_path, INIT_CODE=100)
    build_double(NCCL, tmp_path)
    assert run("-c", FOUND, env=with_libraries(tmp_path)) == "22304\n"


@without_own_nccl
def test_check_build_says_what_was_found_and_where(folder: Path) -> None:
    shown = run("-m", "horo.runner", "--check-build", env=with_libraries(folder))
    assert "Libraries for GPUs (not tried on one yet; for --gpu-operations staged and nccl):" in shown
    assert line_of(shown, "CUDA driver").split() == [
        "[X]",
        *["CUDA", "driver", "12.4,", "2", "devices"],
        str(folder / CUDA),
    ]
    assert line_of(shown, "NCCL").split() == ["[X]", "NCCL", "2.23.4", str(folder / NCCL)]


@without_own_nccl
def test_check_build_says_why_not(tmp_path: Path) -> None:
    build_double(CUDA, tmp_path, INIT_CODE=100)
    build_double(NCCL, tmp_path, VERSION=20000)
    shown = run("-m", "horo.runner", "--check-build", env=with_libraries(tmp_path))
    cuda, nccl = line_of(shown, "CUDA driver"), line_of(shown, "NCCL")
    assert cuda.startswith("[ ] CUDA driver ")
    assert cuda.endswith("cuInit failed with code 100: no CUDA-capable device is detected")
    assert nccl.startswith("[ ] NCCL ")
    assert f"{tmp_path / NCCL} is NCCL 2.0.0; horo needs 2.18.1" in nccl


def test_a_package_that_is_a_part_of_nvidia_does_not_hide_that_of_nccl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some of NVIDIA's packages bring an ``__init__.py``: of two folders, Python then sees one."""
    whole, part = tmp_path / "site" / "nvidia", tmp_path / "user" / "nvidia"
    file = part / "nccl" / "lib" / NCCL
    file.parent.mkdir(parents=True)
    file.touch()
    whole.mkdir(parents=True)
    (whole / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    for folder in (part, whole):
        monkeypatch.syspath_prepend(str(folder.parent))
    assert str(file) in nccl_places()[:-1]
