"""Options and variables that tune horo, checked where the job starts: one sentence here, none from every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from horo._config import Config, LaunchVariables, Variable, names_of, variables_of
from horo.errors import UsageError
from horo.runner.config import JobError

if TYPE_CHECKING:
    import argparse

__all__ = ["check_exports", "start_timeout", "tuning_variables"]


def tuning_variables(given: argparse.Namespace) -> dict[str, str]:
    """The variables that the options stand for.

    Raises:
        JobError: horo does not take a value, or an option makes another one useless; names the option.
    """
    if given.stall_check_warning_time_seconds == 0 and given.stall_check_shutdown_time_seconds is not None:
        raise JobError(
            "--stall-check-shutdown-time-seconds has no effect beside --stall-check-warning-time-seconds 0: leave out "
            "one of them"
        )
    variables = {}
    for option, (name, value) in _said(given).items():
        if value is not None:
            text = f"{value:.15g}" if isinstance(value, float) else str(value)
            _check({name: text}, f"{option}: ")
            variables[name] = text
    return variables


def _said(given: argparse.Namespace) -> dict[str, tuple[str, Any]]:
    """The variable of each option and its value; None: the option is not there."""
    megabytes = given.fusion_threshold_mb
    return {
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
        "--horovod": ("HORO_HOROVOD", 1 if given.horovod else None),
        "--no-move-ranks": ("HORO_LEAVE_CROWDED_CORES", 0 if given.no_move_ranks else None),
        "--network-interfaces": ("HORO_NETWORK_INTERFACES", ",".join(given.network_interfaces) or None),
    }


def check_exports(exports: Mapping[str, str], given: argparse.Namespace) -> None:
    """Checks the values of ``-x``.

    Raises:
        JobError: hororun sets the variable itself, an option sets it as well, or horo does not take its value.
    """
    from horo.runner.job.environment import TORCH_VARIABLES  # noqa: PLC0415 - --help does without
    from horo.runner.processes import MARK_NAME  # noqa: PLC0415

    own = {MARK_NAME, *names_of(LaunchVariables)}
    torch = TORCH_VARIABLES if given.torch_env or given.master_port else ()
    for name in exports:
        if name in own or name in torch:
            raise JobError(
                f"-x {name}: hororun sets {name} for every rank{' (--torch-env)' * (name in torch)}: leave it out"
            )
    spellings = {variable.names[0]: variable.names for variable in variables_of(Config).values()}
    for option, (variable, value) in _said(given).items():
        twice = next((name for name in spellings[variable] if name in exports), None)
        if value is not None and twice is not None:
            raise JobError(f"{option} and -x {twice} both set {variable}: leave out one of them")
    _check(exports, "")


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
