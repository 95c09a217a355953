"""What the tests of single parts of the core share."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import native_build
import pytest

if os.environ.get("HORO_SANITIZE"):
    # The tests of the whole core then run on the instrumented build, too.
    sys.modules["horo._native"] = native_build.load()


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """The core and the shims as one cffi module (`native.lib`, `native.ffi`), compiled if anything has changed."""
    return native_build.load()
