"""The memory and the wake-up descriptors that ranks of a host share."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
from descriptors import open_descriptors


@pytest.fixture
def make(native: ModuleType) -> Callable[..., tuple[int, int, str]]:
    """Calls ``horo_create_memory`` or ``horo_create_wake``: its status, the descriptor and the sentence."""

    def call(what: str, *words: int) -> tuple[int, int, str]:
        out, error = native.ffi.new("int32_t *", -1), native.ffi.new("char[]", native.lib.HORO_MESSAGE_MAX)
        status = getattr(native.lib, f"horo_create_{what}")(*words, out, error, native.lib.HORO_MESSAGE_MAX)
        return status, out[0], native.ffi.string(error).decode()

    return call


def test_memory_is_zero_and_grows_but_never_shrinks(make: Callable[..., tuple[int, int, str]]) -> None:
    status, memory, _ = make("memory", 10_000)
    assert status == 0
    try:
        assert os.pread(memory, 20_000, 0) == bytes(10_000)
        assert fcntl.fcntl(memory, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        os.ftruncate(memory, 20_000)
        with pytest.raises(PermissionError):
            os.ftruncate(memory, 19_999)
        with pytest.raises(PermissionError):
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    finally:
        os.close(memory)


def test_a_wake_is_an_eventfd_that_blocks_nobody(make: Callable[..., tuple[int, int, str]]) -> None:
    status, wake, _ = make("wake")
    assert status == 0
    try:
        assert fcntl.fcntl(wake, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        with pytest.raises(BlockingIOError):
            os.read(wake, 8)
        os.eventfd_write(wake, 3)
        assert os.eventfd_read(wake) == 3
    finally:
        os.close(wake)


def test_more_memory_than_a_file_may_have_is_an_error_that_says_how_much(
    native: ModuleType, make: Callable[..., tuple[int, int, str]]
) -> None:
    before = open_descriptors()
    status, memory, text = make("memory", 1 << 63)
    assert (status, memory) == (native.lib.HORO_ERR_RESOURCE, -1)
    assert text == f"cannot create {1 << 63} bytes of shared memory: Invalid argument"
    assert open_descriptors() <= before


def test_without_a_free_descriptor_both_say_so() -> None:
    code = f"""
import resource
from horo.core import context
from horo.errors import ResourceError
resource.setrlimit(resource.RLIMIT_NOFILE, (3, {resource.getrlimit(resource.RLIMIT_NOFILE)[1]}))
for make, words in ((context.create_memory, (10,)), (context.create_wake, ())):
    try:
        make(*words)
    except ResourceError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "cannot create shared memory (memfd_create): Too many open files",
        "cannot create an eventfd: Too many open files",
    ]
