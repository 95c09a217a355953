"""What a process finds: libraries for GPUs, by doubles of them; parts that are missing, named in one sentence."""

import copy
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from doubles import CUDA, NCCL, build_double
from jobs import run_python

import horo.torch as hvd
from horo import errors
from horo.bootstrap.gpu_libraries import nccl_places
from horo.torch.compat.torch_version import check_version

TORCHES = [
    ("None", "torch, which is not installed: pip install torch"),
    (
        "types.SimpleNamespace(__version__='1.13.1+cu117')",
        "torch 2.1 or newer; 1.13.1+cu117 is installed: pip install -U torch",
    ),
]


@pytest.mark.parametrize(("torch", "said"), TORCHES, ids=["missing", "old"])
def test_missing_and_old_torch_are_named(torch: str, said: str) -> None:
    done = run_python("-c", f"import sys, types\nsys.modules['torch'] = {torch}\nimport horo.torch")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, f"ImportError: horo.torch needs {said}")


@pytest.mark.parametrize("version", ["2.1.0", "2.13.0+cpu", "2.1.0a0+git123", "3.0"])
def test_new_enough_versions_pass(version: str) -> None:
    check_version(version)


TREE = Path(__file__).parents[2]
_SKIPPED = shutil.ignore_patterns("*.so", "__pycache__")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkout in which nothing is built."""
    shutil.copytree(TREE / "horo", tmp_path / "source" / "horo", ignore=_SKIPPED)
    (tmp_path / "source" / "native").mkdir()
    shutil.copy(TREE / "native" / "build.py", tmp_path / "source" / "native")
    return tmp_path / "source"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with an installed horo."""
    shutil.copytree(TREE / "horo", tmp_path / "installed" / "horo")
    return tmp_path / "installed"


def last_line(words: list[str], *path: Path, folder: Path) -> str:
    """Of stderr of a Python with only these folders, and the libraries, on its path; it must fail."""
    # Without -S they would bring this tree's own horo.
    libraries = [*map(str, path), *(each for each in sys.path if each.endswith("-packages"))]
    environment = {"PYTHONPATH": os.pathsep.join(libraries)}
    done = run_python("-S", *words, cwd=folder, environment=environment)
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


def test_an_extension_older_than_the_source_is_named_and_other_modules_are_pythons_own_error(source: Path) -> None:
    shutil.copy(next((TREE / "horo").glob("_native*.so")), source / "horo")
    calls = source / "horo" / "core" / "calls.py"
    calls.write_text(calls.read_text().replace("_calls.Gradient", "_calls.Newer"))
    line = last_line(["-c", "import horo.core.calls"], folder=source)
    assert line.startswith(f"ImportError: {source / 'horo'}/_native")
    assert line.endswith(
        f"was built from older source, as module 'horo._calls' has no attribute 'Newer': pip install -e {source}"
    )
    line = last_line(["-c", "import horo.no_such_module"], folder=source)
    assert line == "ModuleNotFoundError: No module named 'horo.no_such_module'"


STATUSES = {"TimeoutError": "TIMEOUT", "PeerLostError": "PEER_LOST", "UnsupportedError": "UNSUPPORTED"}
CLASSES = [name for name in errors.__all__ if isinstance(getattr(errors, name), type)]


def test_every_public_name_of_the_module_is_an_error() -> None:
    assert errors.__all__ == CLASSES
    assert all(issubclass(getattr(errors, name), errors.HoroError) for name in CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_horo_torch_has_the_same_class(name: str) -> None:
    assert getattr(hvd, name) is getattr(errors, name)
    assert getattr(errors, name).__module__ == "horo.errors"  # so a traceback names what a script imports


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_an_error_can_be_pickled(name: str, protocol: int) -> None:
    error = getattr(errors, name)("allreduce 'w': rank 1 (h2) is gone")
    for other in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(other) is type(error)
        assert (str(other), other.args) == (str(error), error.args)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("TimeoutError", TimeoutError), ("PeerLostError", ConnectionError), ("UnsupportedError", NotImplementedError)],
)
def test_an_error_is_what_python_calls_it_too(name: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^rank 1 is gone$") as caught:
        raise errors.error_from_status(f"HORO_ERR_{STATUSES[name]}", "rank 1 is gone")
    assert type(caught.value) is getattr(errors, name)
    assert caught.value.args == ("rank 1 is gone",)
    assert getattr(caught.value, "errno", None) is None


TOLD = "import horo.torch as hvd; print(hvd.cuda_built(), hvd.nccl_built())"
FOUND = "from horo.bootstrap.gpu_libraries import find_cuda, find_nccl; find_cuda(); print(find_nccl().version)"


def with_libraries(*folders: Path, packages: Path | None = None) -> dict[str, str]:
    """Has the loader find libraries in ``folders``, and Python find ``packages``."""
    added = {"PYTHONPATH": str(packages)} if packages is not None else {}
    return {"LD_LIBRARY_PATH": ":".join(map(str, folders)), **added}


def run(*words: str, environment: dict[str, str]) -> str:
    done = run_python(*words, environment=environment)
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
    assert run("-c", TOLD, environment=with_libraries(folder)) == "True 22304\n"


def test_nccl_of_a_package_goes_before_the_systems_and_a_loaded_one_before_all(folder: Path, tmp_path: Path) -> None:
    build_double(NCCL, tmp_path / "nvidia" / "nccl" / "lib", VERSION=22703)
    assert run("-c", FOUND, environment=with_libraries(folder, packages=tmp_path)) == "22703\n"
    loaded = build_double(NCCL, tmp_path / "loaded", VERSION=22105)
    code = f"import ctypes; ctypes.CDLL({str(loaded)!r}); {FOUND}"
    assert run("-c", code, environment=with_libraries(folder, packages=tmp_path)) == "22105\n"


@without_own_nccl
def test_asking_does_not_initialize_the_driver(tmp_path: Path) -> None:
    build_double(CUDA, tmp_path, INIT_CODE=100)
    build_double(NCCL, tmp_path)
    assert run("-c", FOUND, environment=with_libraries(tmp_path)) == "22304\n"


@without_own_nccl
def test_check_build_says_what_was_found_and_where(folder: Path) -> None:
    shown = run("-m", "horo.runner", "--check-build", environment=with_libraries(folder))
    assert "Libraries for GPUs (not tried on one yet; for --gpu-operations staged and nccl):" in shown
    assert " ".join(line_of(shown, "CUDA driver").split()) == f"[X] CUDA driver 12.4, 2 devices {folder / CUDA}"
    assert line_of(shown, "NCCL").split() == ["[X]", "NCCL", "2.23.4", str(folder / NCCL)]


@without_own_nccl
def test_check_build_says_why_not(tmp_path: Path) -> None:
    build_double(CUDA, tmp_path, INIT_CODE=100)
    build_double(NCCL, tmp_path, VERSION=20000)
    shown = run("-m", "horo.runner", "--check-build", environment=with_libraries(tmp_path))
    cuda, nccl = line_of(shown, "CUDA driver"), line_of(shown, "NCCL")
    assert cuda.startswith("[ ] CUDA driver ")
    assert cuda.endswith("cuInit failed with code 100: no CUDA-capable device is detected")
    assert nccl.startswith("[ ] NCCL ")
    assert f"{tmp_path / NCCL} is NCCL 2.0.0; horo needs 2.18.1" in nccl


def test_another_package_of_nvidia_does_not_hide_that_of_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
