"""What the tests of single parts of the core share."""

import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import native_build
import pytest
from doubles import CUDA, NCCL, build_double
from skips import no_compiler

if native_build.FLAVOUR or not no_compiler():
    # With the checks of native_build.CHECK_FLAGS; and a sanitizer reports what it cannot see, of the installed module,
    # as races.
    sys.modules["horo._native"] = native_build.load()

from device_group import Gpu, Nccl
from ranks import wait_for

_names = count()


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """The core and the shims as one cffi module (`native.lib`, `native.ffi`), compiled if anything has changed."""
    if not native_build.is_built() and (reason := no_compiler()):
        pytest.skip(reason)
    return native_build.load()


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[Gpu]:
    """A driver of its own for each test, which has nothing left at the end."""
    found = Gpu(build_double(CUDA, tmp_path, soname=f"double-cuda-{next(_names)}.so", DELAYS=20, DEVICES=8))
    yield found
    found.close_streams()
    left = found.counts()
    del left["pinned_ever"]
    if found.is_broken:  # the driver may still call a function of horo's, so what that uses stays
        return
    assert left == {"streams": 0, "contexts": 0, "events": 0, "pinned": 0}
    found.end()


@pytest.fixture
def make_nccl(gpu: Gpu, tmp_path: Path) -> Iterator[Callable[..., Nccl]]:
    """Builds NCCL over that driver; at the end nothing is left of it, and it has been used in order."""
    made = []

    def build(**defines: Any) -> Nccl:
        number = next(_names)
        options = {"CUDA_DOUBLE": f'"{gpu.path}"', "DELAYS": 5, **defines}
        made.append(Nccl(build_double(NCCL, tmp_path / str(number), soname=f"double-nccl-{number}.so", **options)))
        return made[-1]

    yield build
    for each in made:
        wait_for(lambda each=each: each.counts()["comms"] == 0)  # type: ignore[misc]  # its kernels may end later
        counts = each.counts()
        assert [counts[name] for name in ("comms", "misuses", "scales", "mismatches")] == [0] * 4
        each.check_order()


@pytest.fixture
def nccl(make_nccl: Callable[..., Nccl]) -> Nccl:
    return make_nccl()
