"""Libraries for GPUs are found where they are, and of each that is of no use the reason is told."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from doubles import CUDA, NCCL, build_double
from ranks import run_script


class Found(NamedTuple):
    status: int
    name: str
    version: int
    devices: int
    path: str
    sentence: str


Find = Callable[..., Found]
_numbers = count()


@pytest.fixture
def find(native: ModuleType) -> Find:
    """Calls ``horo_find_library``."""

    def call(library: str, paths: list[Path | str], *, initializes: bool = False) -> Found:
        ffi, lib = native.ffi, native.lib
        kind = lib.HORO_LIBRARY_CUDA if library == CUDA else lib.HORO_LIBRARY_NCCL
        names = [ffi.new("char[]", str(path).encode()) for path in paths]
        found, error = ffi.new("horo_library *"), ffi.new("char[]", lib.HORO_MESSAGE_MAX)
        status = lib.horo_find_library(
            kind, ffi.new("char *[]", names), len(names), initializes, found, error, lib.HORO_MESSAGE_MAX
        )
        texts = [ffi.string(part).decode() for part in (found.name, found.path, error)]
        return Found(status, texts[0], found.version, found.device_count, texts[1], texts[2])

    return call


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Builds a double in a folder of its own, under a name of its own, so that no test finds that of another."""

    def build(library: str, **defines: int) -> Path:
        number = next(_numbers)
        return build_double(library, tmp_path / str(number), soname=f"double-{number}.so", **defines)

    return build


def test_a_library_is_found_with_its_version_and_place(find: Find, make: Any) -> None:
    """The driver is initialized only where that is wanted."""
    driver, nccl, old = make(CUDA, DEVICES=8, VERSION=13000), make(NCCL), make(NCCL, VERSION=21801)
    assert find(CUDA, [driver]) == Found(0, "CUDA driver 13.0", 13000, -1, str(driver), "")
    assert find(CUDA, [driver], initializes=True) == Found(0, "CUDA driver 13.0", 13000, 8, str(driver), "")
    assert find(NCCL, [nccl]) == Found(0, "NCCL 2.23.4", 22304, -1, str(nccl), "")
    assert find(NCCL, [old]).name == "NCCL 2.18.1"


def test_a_driver_that_cannot_be_initialized_says_why(find: Find, make: Any) -> None:
    path = make(CUDA, INIT_CODE=100)
    found = find(CUDA, [path], initializes=True)
    assert found.status == -20
    assert found.sentence == (
        f"CUDA driver 12.4 ({path}) cannot be used: cuInit failed with code 100: no CUDA-capable device is detected"
    )
    other = find(CUDA, [make(CUDA, INIT_CODE=999)], initializes=True)
    assert other.sentence.endswith("cuInit failed with code 999: the driver has no text for it")


@pytest.mark.parametrize(
    ("library", "defines", "reason"),
    [
        (CUDA, {"LACKS_INIT": 1}, "{} lacks cuInit"),
        (CUDA, {"VERSION": 11030}, "{} is CUDA driver 11.3; horo needs 11.4"),
        (CUDA, {"VERSION_CODE": 34}, "{} cuDriverGetVersion failed with code 34: the driver has no text for it"),
        (NCCL, {"VERSION": 21707}, "{} is NCCL 2.17.7; horo needs 2.18.1"),
        (NCCL, {"VERSION_CODE": 2}, "{} ncclGetVersion failed with code 2: unhandled system error"),
    ],
)
def test_a_useless_library_says_why(find: Find, make: Any, library: str, defines: dict[str, int], reason: str) -> None:
    path = make(library, **defines)
    what = "CUDA driver" if library == CUDA else "NCCL"
    found = find(library, [path])
    assert (found.status, found.sentence) == (-20, f"no usable {what}: {reason.format(path)}")


def test_the_first_place_of_use_is_taken_and_all_others_give_their_reason(find: Find, make: Any) -> None:
    old, bare = make(NCCL, VERSION=20000), make(CUDA)
    good, later = make(NCCL), make(NCCL, VERSION=22400)
    assert find(NCCL, [old, bare, good, later]).path == str(good)
    found = find(NCCL, ["/nowhere/libnccl.so.2", old, bare])
    assert found.sentence.startswith("no usable NCCL: /nowhere/libnccl.so.2: cannot open shared object file")
    assert found.sentence.endswith(f"; {old} is NCCL 2.0.0; horo needs 2.18.1; {bare} lacks ncclGetVersion")


def test_what_is_no_library_is_told_and_reasons_that_do_not_fit_are_cut(find: Find, tmp_path: Path) -> None:
    text = tmp_path / "libnccl.so.2"
    text.write_text("no library")
    assert f"{text}: " in find(NCCL, [text]).sentence
    assert find(NCCL, []).sentence == "no usable NCCL: there is no place to look for it"
    sentence = find(CUDA, [f"/nowhere/{number}/{'x' * 200}" for number in range(20)]).sentence
    assert len(sentence) == 1023
    assert sentence.startswith("no usable CUDA driver: /nowhere/0/")


LOADED_FIRST = """
import ctypes, sys
import native_build
loaded, other = sys.argv[1:]
ctypes.CDLL(loaded)
native = native_build.load()
ffi, lib = native.ffi, native.lib
for paths in (["", other], [""], [other]):
    names = [ffi.new("char[]", path.encode()) for path in paths]
    found, error = ffi.new("horo_library *"), ffi.new("char[]", 1024)
    assert lib.horo_find_library(1, ffi.new("char *[]", names), len(names), 0, found, error, 1024) == 0
    print(ffi.string(found.name).decode(), ffi.string(found.path).decode())
"""


@pytest.mark.usefixtures("native")  # built, so that the time limit is for running only
def test_what_is_in_the_process_already_is_taken_where_that_is_wanted(tmp_path: Path) -> None:
    loaded = build_double(NCCL, tmp_path / "loaded", VERSION=22222)
    other = build_double(NCCL, tmp_path / "other")
    said = run_script(LOADED_FIRST, loaded, other)  # in a process of its own, which keeps that library
    assert said.splitlines() == [f"NCCL 2.22.22 {loaded}"] * 2 + [f"NCCL 2.23.4 {other}"]
