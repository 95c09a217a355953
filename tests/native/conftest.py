"""What the tests of single parts of the core share."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import native_build
import pytest
from cases import CASES_UNDER_A_SANITIZER, spread
from pytest import Config, Function, Item

if native_build.FLAVOUR:
    # All of the core under the sanitizer: what it cannot see, that of the installed module, it would report as races.
    sys.modules["horo._native"] = native_build.load()


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """The core and the shims as one cffi module (`native.lib`, `native.ffi`), compiled if anything has changed."""
    return native_build.load()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Config, items: list[Item]) -> None:
    """A sanitizer's run takes some cases of tests that have many; `HORO_SANITIZE_ALL=1` takes all."""
    if not native_build.FLAVOUR or os.environ.get("HORO_SANITIZE_ALL") == "1" or config.option.keyword:
        return
    of_test: dict[str, list[Function]] = {}
    for item in items:
        if isinstance(item, Function) and hasattr(item, "callspec"):
            of_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[Item] = set()
    for cases in of_test.values():
        # The cases of a test have the objects of its lists of values in common.
        values = [(case.name, {n: id(v) for n, v in case.callspec.params.items()}) for case in cases]
        chosen = spread(values, CASES_UNDER_A_SANITIZER)
        left_out |= {case for case in cases if case.name not in chosen}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
