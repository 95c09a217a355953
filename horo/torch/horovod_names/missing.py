"""Names of Horovod that are not there: using or importing one is an error that names another way."""

from __future__ import annotations

from types import ModuleType
from typing import NoReturn

__all__ = ["raise_missing", "sentence"]

INSTEAD = {
    "elastic": "save checkpoints, and start again from the last one after a HorovodInternalError",
}
"""The alternative for each name of ``horovod.torch`` that is missing."""


def sentence(module: str, name: str) -> str:
    """The words about a name that ``INSTEAD`` has."""
    return f"{module} has {name!r}; this version of horo does not have it: {INSTEAD[name]}"


def raise_missing(module: ModuleType, name: str) -> NoReturn:
    """The ``__getattr__`` of ``horo.torch`` and of its ``mpi_ops``.

    Raises:
        AttributeError: always, so that ``hasattr`` is False.
    """
    if name in INSTEAD:
        text = sentence(module.__name__.replace("horo", "horovod", 1), name)
    else:
        text = f"module {module.__name__!r} has no attribute {name!r}"
    raise AttributeError(text, name=name, obj=module)
