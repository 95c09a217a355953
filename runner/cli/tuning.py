"""Options and variables that tune horo, checked where the job starts: one sentence here, none from every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from horo._config import Config, Variable, variables_of
from horo.errors import UsageError
from horo.runner.config import JobError

if TYPE_CHECKING:
    import argparse

__all__ = ["check_variables", "start_timeout", "tuning_variables"]


def tuning_variables(given: argparse.Namespace) -> dict[str, str]:
    """The variables that the options stand for.

    Raises:
        JobError: horo does not take a value; names the option.
    """
    megabytes = given.fusion_threshold_mb
    said = {
        "--start-timeout": ("HORO_START_TIMEOUT", given.start_timeout),
        "--fusion-threshold-mb": ("HORO_FUSION_THRESHOLD", None if megabytes is None else megabytes << 20),
        "--cycle-time-ms": ("HORO_CYCLE_TIME", given.cycle_time_ms),
        "--cache-capacity": ("HORO_CACHE_CAPACITY", given.cache_capacity),
        "--no-stall-check": ("HORO_STALL_CHECK_DISABLE", 1 if given.no_stall_check else None),
        "--stall-check": ("HORO_STALL_CHECK_DISABLE", 0 if given.stall_check else None),
        "--stall-check-warning-time-seconds": (
            "HORO_STALL_CHECK_TIME_SECONDS",
            given.stall_check_warning_time_seconds,
        ),
        "--stall-check-shutdown-time-seconds": (
            "HORO_STALL_SHUTDOWN_TIME_SECONDS",
            given.stall_check_shutdown_time_seconds,
        ),
        "--log-level": ("HORO_LOG_LEVEL", given.log_level),
    }
    variables = {}
    for option, (name, value) in said.items():
        if value is not None:
            text = f"{value:.15g}" if isinstance(value, float) else str(value)
            _check({name: text}, f"{option}: ")
            variables[name] = text
    return variables


def check_variables(environ: Mapping[str, str]) -> None:
    """Raises JobError if horo does not take the value of one of these variables; names it."""
    _check(environ, "")


def start_timeout(given: float | None, environ: Mapping[str, str]) -> float:
    """Seconds: what ``--start-timeout`` said, or else ``HORO_START_TIMEOUT``, or its default.

    Raises:
        JobError: the variable is none; names it and its value.
    """
    if given is not None:
        return given
    return float(_read(variables_of(Config)["start_timeout_s"], environ, ""))


def _check(environ: Mapping[str, str], prefix: str) -> None:
    for variable in variables_of(Config).values():
        _read(variable, environ, prefix)


def _read(variable: Variable, environ: Mapping[str, str], prefix: str) -> Any:
    try:
        return variable.read(environ)
    except UsageError as error:
        raise JobError(f"{prefix}{error}") from None
