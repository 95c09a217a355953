"""The settings that are in force in a job, and where each comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from horo.config.sources import AUTOTUNE
from horo.config.table import Config, variables_of

__all__ = ["Settings", "settings_of"]


class Settings(Mapping[str, Any]):
    """The value of each setting by its name, in the order of the reference; printed as a table with the sources.

    Args:
        values: by name.
        sources: by name, as ``source()`` returns them.
    """

    def __init__(self, values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
        self._values, self._sources = dict(values), dict(sources)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def source(self, name: str) -> str:
        """The source of a value.

        Returns:
            ``"init()"`` for an argument of it, the name of an environment variable, ``"hororun --OPTION"``,
            ``"file NAME"`` for ``hororun --config-file``, ``"autotune"`` for a value that autotuning has
            put in force instead, or ``"default"``.

        Raises:
            KeyError: There is no such setting.
        """
        return self._sources[name]

    def tuned(self, values: Mapping[str, Any]) -> Settings:
        """These settings, with values that autotuning has put in force."""
        return Settings({**self._values, **values}, {**self._sources, **dict.fromkeys(values, AUTOTUNE)})

    def __repr__(self) -> str:
        units = {name: variable.unit for name, variable in variables_of(Config).items()}
        rows = [(name, f"{self[name]} {units.get(name, '')}".rstrip(), self._sources[name]) for name in self]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{name:{widths[0]}}  {value:{widths[1]}}  {source}" for name, value, source in rows)


def settings_of(config: Config, chosen: Mapping[str, Any] | None = None) -> Settings:
    """The settings of a process.

    Args:
        config: the result of ``read_config``.
        chosen: by name, the values that horo has chosen where the user has not.
    """
    values = {name: getattr(config, name) for name in variables_of(Config)}
    return Settings({**values, **(chosen or {})}, {name: config.source(name) for name in values})
