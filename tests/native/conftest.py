"""What the tests of single parts of the core share."""

from __future__ import annotations

from types import ModuleType

import native_build
import pytest


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """The core and the shims as one cffi module (`native.lib`, `native.ffi`), compiled if anything has changed."""
    return native_build.load()
