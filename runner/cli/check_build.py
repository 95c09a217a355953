"""``hororun --check-build``: the abilities of this installation, and where each part of it was found."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from horo.errors import HoroError
from horo.runner.stdout import show
from horo.version import HOROVOD_VERSION, __version__

if TYPE_CHECKING:
    from horo.core.libraries import Library

__all__ = ["check_build", "why_not"]


class _Part(NamedTuple):
    present: bool
    what: str
    where: str


def check_build(for_horovod: bool = False) -> int:
    """Shows it; returns 0 when ``init()`` works here, else 1.

    Args:
        for_horovod: begin with the table that horovodrun shows, which scripts look into.

    Raises:
        JobError: stdout cannot be written.
    """
    core = context()
    no_memory = _memory() if core.present else "needs the core"
    sections = {
        "Available frameworks": [_torch()],
        "Native core": [core],
        "Available tensor operations": [
            _Part(not no_memory, "arena (ranks on one host)", no_memory or "memfd of this kernel"),
            _Part(core.present, "TCP (between hosts)", "sockets of this kernel" if core.present else "needs the core"),
            _mpi(),
        ],
        "Libraries for GPUs (not tried on one yet; for --gpu-operations staged and nccl)": _gpu_libraries(),
        "Ways to start ranks elsewhere": [_program("ssh"), _program("srun"), _program("mpirun"), _program("jsrun")],
    }
    sections["Settings from the environment"] = _settings()
    failure = _init()
    lines = _horovods_table(core.present) if for_horovod else []
    lines.append(f"horo {__version__:<34} {_folder('horo')}")
    lines.append(f"Python {platform.python_version():<32} {sys.executable}")
    for title, parts in ((title, parts) for title, parts in sections.items() if parts):
        lines += ["", f"{title}:"]
        lines += [f"    [{'X' if part.present else ' '}] {part.what:<31} {part.where}" for part in parts]
    if failure:
        lines += ["", f"init() fails here: {failure}"]
    show("\n".join(lines))
    return 1 if failure else 0


def _horovods_table(has_core: bool) -> list[str]:
    """Horovod's table, as its functions answer here: its Gloo is horo's own transports, which need no MPI."""
    has_mpi, (_, nccl) = _mpi().present, _gpu_libraries()
    table = {
        "Frameworks": {"TensorFlow": False, "PyTorch": _torch().present, "MXNet": False},
        "Controllers": {"MPI": has_mpi, "Gloo": has_core},
        "Tensor Operations": {"NCCL": nccl.present, "DDL": False, "CCL": False, "MPI": has_mpi, "Gloo": has_core},
    }
    lines = [f"Horovod v{HOROVOD_VERSION}:", ""]
    for title, parts in table.items():
        lines += [
            f"Available {title}:",
            *(f"    [{'X' if there else ' '}] {name}" for name, there in parts.items()),
            "",
        ]
    return lines


def _settings() -> list[_Part]:
    """The settings that environment variables have changed here; ``_init`` reports a wrong value."""
    from horo.config.settings import settings_of  # noqa: PLC0415
    from horo.config.table import environment, read_config  # noqa: PLC0415 - for this option only

    try:
        settings = settings_of(read_config(environment()))
    except HoroError:
        return []
    changed = [name for name in settings if settings.source(name) != "default"]
    return [_Part(True, f"{name} {settings[name]}", settings.source(name)) for name in changed]


def _init() -> str:
    """The reason why ``init()`` of a job of one rank fails in this environment; empty: it does not."""
    if find_spec("torch") is None:
        return "horo.torch needs PyTorch, which is not installed: pip install torch"
    try:
        from horo.bootstrap.job import start  # noqa: PLC0415 - the launcher must run without the core
        from horo.config.table import LaunchVariables, environment, names_of  # noqa: PLC0415

        launch = names_of(LaunchVariables)
        kept = {name: value for name, value in environment().items() if name.startswith("HORO") and name not in launch}
        start({**kept, "HORO_CONTROLLER": "gloo"}).close()
    except (ImportError, OSError, HoroError) as error:
        return str(error)
    return ""


def _program(name: str) -> _Part:
    path = shutil.which(name)
    return _Part(path is not None, name, path or "not found in PATH")


def context() -> _Part:
    try:
        from horo.core import context  # noqa: PLC0415 - the launcher must run without it

        what = f"{context.version()}, SIMD {context.simd_name()}"
    except (ImportError, OSError) as error:
        return _Part(False, "cannot be loaded", str(error))
    return _Part(True, what, sys.modules["horo._native"].__file__ or "")


def _memory() -> str:
    """The reason why this kernel gives no memory that ranks can share; empty: it does."""
    from horo.core.memory import create_memory  # noqa: PLC0415 - the launcher must run without the core

    try:
        os.close(create_memory(1))
    except HoroError as error:
        return str(error)
    return ""


def _torch() -> _Part:
    """By its metadata: importing it would take seconds."""
    try:
        return _Part(True, f"PyTorch {metadata.version('torch')}", _folder("torch"))
    except metadata.PackageNotFoundError:
        return _Part(False, "PyTorch", "not installed: pip install torch")


def _mpi() -> _Part:
    """By its metadata, and the library that it finds: importing it would start MPI."""
    try:
        what = f"MPI (mpi4py {metadata.version('mpi4py')})"
    except metadata.PackageNotFoundError:
        return _Part(False, "MPI", "needs mpi4py: pip install mpi4py")
    try:
        from horo.bootstrap.mpi.world import why_no_mpi  # noqa: PLC0415 - as context
    except (ImportError, OSError):
        return _Part(False, what, "needs the core")
    reason = why_no_mpi()
    return _Part(not reason, what, reason or _folder("mpi4py"))


def _gpu_libraries() -> list[_Part]:
    """Initializes the CUDA driver, if there is one: this process ends soon."""
    try:
        from horo.bootstrap.gpu_libraries import find_cuda, find_nccl  # noqa: PLC0415 - as context
    except (ImportError, OSError):
        return [_Part(False, name, "needs the core") for name in ("CUDA driver", "NCCL")]
    finders: dict[str, Callable[[], Library]] = {"CUDA driver": partial(find_cuda, initializes=True), "NCCL": find_nccl}
    parts = []
    for name, find in finders.items():
        try:
            found = find()
        except HoroError as error:
            parts.append(_Part(False, name, why_not(str(error))))
        else:
            devices = f", {found.device_count} devices" if found.device_count >= 0 else ""
            parts.append(_Part(True, f"{found.name}{devices}", found.path))
    return parts


def why_not(text: str) -> str:
    """The reason why a library cannot be used: of all places that were tried, those that have one."""
    tries = text.partition(": ")[2].split("; ")
    return "; ".join(each for each in tries if not each.endswith(os.strerror(errno.ENOENT))) or "not found"


def _folder(package: str) -> str:
    spec = find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return places[0] if places else "not found"
