"""The sources of settings: arguments, variables, options, files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields

from horo.config.launch_variables import LaunchVariables
from horo.config.variable import Variable

__all__ = ["ARGUMENT", "AUTOTUNE", "DEFAULT", "encode_sources", "read_sources"]

ARGUMENT = "init()"
AUTOTUNE = "autotune"
DEFAULT = "default"
_SOURCES: str = next(
    item.metadata["variable"].names[0] for item in fields(LaunchVariables) if item.name == "config_sources"
)


def read_sources(variables: Mapping[str, Variable], environ: Mapping[str, str]) -> dict[str, str]:
    """By setting, the source of its value, as ``Settings.source()`` returns it, if it is no argument of ``init()``."""
    recorded = _recorded(environ)
    return {name: _source(variable, environ, recorded) for name, variable in variables.items()}


def _source(variable: Variable, environ: Mapping[str, str], recorded: Mapping[str, tuple[str, str]]) -> str:
    name = variable.set_name(environ)
    value, source = recorded.get(name, ("", ""))
    return source if name and environ[name] == value else name or DEFAULT


def encode_sources(variables: Mapping[str, str], sources: Mapping[str, str]) -> dict[str, str]:
    """The variable that passes the sources of some variables' values from hororun to its ranks."""
    recorded = {name: [variables[name], source] for name, source in sources.items() if name in variables}
    return {_SOURCES: json.dumps(recorded)} if recorded else {}


def _recorded(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """By variable, the value that hororun has set, and where it has it from. A text that is no such list is ignored."""
    try:
        return {str(name): (str(value), str(source)) for name, (value, source) in _list_of(environ).items()}
    except (ValueError, TypeError):
        return {}


def _list_of(environ: Mapping[str, str]) -> dict[str, list[str]]:
    found = json.loads(environ.get(_SOURCES) or "{}")
    return found if isinstance(found, dict) else {}
