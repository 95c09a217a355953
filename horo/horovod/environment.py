"""The environment in which Python finds horo under Horovod's names. Imports nothing heavy: hororun needs it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from horo.config.table import Config, variables_of
from horo.errors import UsageError

__all__ = ["is_switched_on", "with_horovod"]

_SWITCH = variables_of(Config)["horovod"]
_FOLDER = str(Path(__file__).resolve().with_name("path"))


def is_switched_on(environment: Mapping[str, str]) -> bool:
    """Whether a job with this environment has asked for Horovod's names; ``init()`` reports a value that is invalid."""
    try:
        return bool(_SWITCH.read(environment))
    except UsageError:
        return False


def with_horovod(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` with the folder of the module ``horovod`` at the front of ``PYTHONPATH``, and the switch set."""
    others = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", _FOLDER)]
    return {**environment, _SWITCH.names[0]: "1", "PYTHONPATH": os.pathsep.join([_FOLDER, *others])}
