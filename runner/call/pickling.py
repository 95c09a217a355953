"""Pickles the function of ``horo.run`` and what it returns; its code keeps the name of its file, for tracebacks."""

from __future__ import annotations

import io
from collections import ChainMap
from types import CodeType
from typing import Any, ClassVar

import cloudpickle  # type: ignore[import-untyped]

__all__ = ["Pickler", "dumps"]

_NO_FILE = "<dynamic-code>"
"""The name that cloudpickle from 3.1.3 on gives each file, so that equal functions have equal pickles."""


def _reduce_code(code: CodeType) -> Any:
    make, values, *rest = cloudpickle.Pickler.dispatch_table[CodeType](code)
    named = tuple(code.co_filename if isinstance(each, str) and each == _NO_FILE else each for each in values)
    return (make, named, *rest)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's."""

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


def dumps(value: Any) -> bytes:
    """The pickle of a value."""
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
