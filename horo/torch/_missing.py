"""Names of Horovod that are not there: using or importing one is an error that names another way."""

from __future__ import annotations

from types import ModuleType
from typing import NoReturn

__all__ = ["explain_missing", "raise_missing"]

INSTEAD = {
    "elastic": "save checkpoints, and start again from the last one after a HorovodInternalError",
}
"""The alternative for each name of ``horovod.torch`` that is missing."""
_PACKAGE = "horo.torch."


def _sentence(module: str, name: str, instead: str) -> str:
    return f"{module} has {name!r}; this version of horo does not have it: {instead}"


def raise_missing(module: ModuleType, name: str) -> NoReturn:
    """The ``__getattr__`` of ``horo.torch`` and of its ``mpi_ops``.

    Raises:
        AttributeError: always, so that ``hasattr`` is False.
    """
    if name in INSTEAD:
        text = _sentence(module.__name__.replace("horo", "horovod", 1), name, INSTEAD[name])
    else:
        text = f"module {module.__name__!r} has no attribute {name!r}"
    raise AttributeError(text, name=name, obj=module)


def explain_missing(module: str) -> str:
    """The sentence about an import of a missing name, empty for any other.

    ``from horo.torch import x`` looks for a module where there is no attribute, and forgets the error of that.
    """
    name = module.removeprefix(_PACKAGE)
    return _sentence("horovod.torch", name, INSTEAD[name]) if name != module and name in INSTEAD else ""
