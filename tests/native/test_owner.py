"""A forked child is known for one, with and without a page that a fork wipes."""

from __future__ import annotations

import os
from types import ModuleType

import pytest


@pytest.mark.parametrize("by_pid", [False, True])
def test_a_child_is_told_from_its_parent(native: ModuleType, by_pid: bool) -> None:
    owner = native.lib.shim_owner_create(by_pid)
    assert native.lib.shim_owner_is_here(owner) == 1
    child = os.fork()
    if child == 0:
        grandchild = os.fork()
        os._exit(native.lib.shim_owner_is_here(owner) if grandchild == 0 else _wait(grandchild))
    assert _wait(child) == 0
    assert native.lib.shim_owner_is_here(owner) == 1
    native.lib.shim_owner_destroy(owner)


def test_this_kernel_needs_no_system_call(native: ModuleType) -> None:
    owner = native.lib.shim_owner_create(False)
    assert native.lib.shim_owner_asks_kernel(owner) == 0
    native.lib.shim_owner_destroy(owner)


def _wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
