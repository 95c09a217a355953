"""horo: distributed data-parallel training for PyTorch. Import ``horo.torch`` in a training script."""

from horo.import_path import leave_out_current_directory

leave_out_current_directory()  # before anything else is imported

from horo.version import __version__  # noqa: E402 - a module of this folder could hide it

TYPE_CHECKING = False  # type checkers take it for true
if TYPE_CHECKING:
    from typing import Any

    from horo.runner.call import run

__all__ = ["__version__", "run"]


def __getattr__(name: str) -> "Any":
    if name != "run":
        hint = "" if name.startswith("_") else "; the calls of a training script: import horo.torch as hvd"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    from horo.runner.call import run  # noqa: PLC0415 - import horo stays light

    return run
