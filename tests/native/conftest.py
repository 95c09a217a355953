"""What the tests of single parts of the core share."""

from __future__ import annotations

import sys
from types import ModuleType

import native_build
import pytest

if native_build.FLAVOUR:
    # All of the core under the sanitizer: what it cannot see, that of the installed module, it would report as races.
    sys.modules["horo._native"] = native_build.load()


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """The core and the shims as one cffi module (`native.lib`, `native.ffi`), compiled if anything has changed."""
    return native_build.load()
