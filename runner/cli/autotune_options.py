"""Options and variables that tune horo, checked where the job starts: one sentence here, none from every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horo.config.table import (
    Config,
    HororunVariables,
    LaunchVariables,
    Option,
    Variable,
    names_of,
    variables_of,
)
from horo.config.variable import parse_ports
from horo.errors import UsageError
from horo.runner.config import JobError, TimelineMerge

if TYPE_CHECKING:
    import argparse

__all__ = [
    "add_rank_timelines",
    "check_environment",
    "check_exports",
    "drop_replaced",
    "own_switch",
    "port_range",
    "set_all_names",
    "start_timeout",
    "timeline_merge",
    "tuning_sources",
    "tuning_variables",
    "useless_marks",
]


def drop_replaced(given: argparse.Namespace, from_file: Collection[str], exports: Mapping[str, str]) -> None:
    """Takes away the options of a file that the command line replaces in another way than by the same option.

    Args:
        given: the values of all options.
        from_file: destinations of the options that a file stands for.
        exports: the variables of ``-x``.
    """
    replaced = {
        option.destination
        for variable in variables_of(Config).values()
        for option in variable.options
        if any(name in exports for name in variable.names)
    }
    if given.stall_check_warning_time_seconds == "0" and "stall_check_warning_time_seconds" not in from_file:
        replaced.add("stall_check_shutdown_time_seconds")
    for destination in replaced.intersection(from_file):
        setattr(given, destination, [] if isinstance(getattr(given, destination), list) else None)


def set_all_names(exports: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``-x``, with those of the environment that are other names of one of them.

    Of ``HORO_X`` and ``HOROVOD_X`` the first counts, whoever has set it: the command line wins over the environment.
    """
    names: dict[str, str] = {}
    for variable in variables_of(Config).values():
        name = next((name for name in variable.names if name in exports), None)
        if name is not None:
            names |= {other: exports[name] for other in variable.names if other in environ}
    return {**names, **exports}


def tuning_variables(given: argparse.Namespace, spelt: Mapping[str, str]) -> dict[str, str]:
    """The variables that the options stand for.

    Args:
        given: the values of all options.
        spelt: by destination, the options as the user spelt them.

    Raises:
        JobError: horo does not take a value, or an option makes another one useless; names the option.
    """
    if given.stall_check_warning_time_seconds == "0" and given.stall_check_shutdown_time_seconds is not None:
        warning, shutdown = (spelt[f"stall_check_{what}_time_seconds"] for what in ("warning", "shutdown"))
        raise JobError(f"{shutdown} has no effect where {warning} is 0: leave out one of them")
    variables = {}
    for option, name, text in _given(given):
        _check({name: text}, f"{option.name}: ")
        variables[name] = text
    return variables


def tuning_sources(given: argparse.Namespace, from_file: Collection[str], path: str | None) -> dict[str, str]:
    """The sources of the values of ``tuning_variables``, as ``hvd.config()`` shows them.

    Args:
        given: the values of all options.
        from_file: destinations of the options that a file stands for.
        path: of the file.
    """
    return {
        name: f"file {path}" if option.destination in from_file else f"hororun {option.name}"
        for option, name, _ in _given(given)
    }


def _given(given: argparse.Namespace) -> Iterator[tuple[Option, str, str]]:
    """Each option that is there, with its variable and the text that this gets."""
    for variable in variables_of(Config).values():
        for option in variable.options:
            value = getattr(given, option.destination)
            if not option.metavar:
                value = option.value if value else None
            elif isinstance(value, list):
                value = ",".join(value) or None
            if value is not None:
                yield option, variable.names[0], f"{value:.15g}" if isinstance(value, float) else value


def check_exports(exports: Mapping[str, str], given: argparse.Namespace) -> None:
    """Checks the values of ``-x``.

    Raises:
        JobError: hororun sets the variable itself, an option sets it as well, or horo does not take its value.
    """
    from horo.runner.processes import MARK_NAME  # noqa: PLC0415 - --help does without

    own = {MARK_NAME, *names_of(LaunchVariables)}
    for name in exports:
        if name in own:
            raise JobError(f"-x {name}: hororun sets {name} for every rank: leave it out")
    spellings = {variable.names[0]: variable.names for variable in variables_of(Config).values()}
    for option, variable, _ in _given(given):
        twice = next((name for name in spellings[variable] if name in exports), None)
        if twice is not None:
            raise JobError(f"{option.name} and -x {twice} both set {variable}: leave out one of them")
    _check(exports, "")


def check_environment(environ: Mapping[str, str]) -> None:
    """Checks the variables that ranks will find, whoever has set them.

    Raises:
        JobError: horo does not take a value.
    """
    _check(environ, "")


def useless_marks(given: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """The reason why ``--timeline-mark-cycles`` does nothing; empty: it is not there, or there is a timeline.

    Args:
        given: the values of all options.
        environ: that of the ranks.
    """
    is_there = variables_of(Config)["timeline"].set_name(environ) != ""
    return "no --timeline-filename asks for a timeline" if given.timeline_mark_cycles and not is_there else ""


def add_rank_timelines(given: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Adds the timelines that ``--timeline-merge`` needs, if none are asked for: ``all-{rank}.json`` for ``all.json``.

    Args:
        given: the values of all options.
        environ: that of the ranks, as far as it is known.
    """
    from horo.bootstrap.timeline_file import RANK_MARK  # noqa: PLC0415 - --help does without

    setting = variables_of(Config)["timeline"]
    if given.timeline_merge is not None and given.timeline_filename is None and not setting.set_name(environ):
        out = Path(given.timeline_merge)
        given.timeline_filename = str(out.parent / f"{out.stem}-{RANK_MARK}{out.suffix}")


def timeline_merge(given: argparse.Namespace, environ: Mapping[str, str]) -> TimelineMerge | None:
    """The merge that ``--timeline-merge`` asks for.

    Args:
        given: the values of all options.
        environ: that of the ranks.

    Raises:
        JobError: ranks do not write a timeline each.
    """
    from horo.bootstrap.timeline_file import RANK_MARK  # noqa: PLC0415 - --help does without

    if given.timeline_merge is None:
        return None
    setting = variables_of(Config)["timeline"]
    pattern = _read(setting, environ, "")
    if RANK_MARK not in pattern:
        raise JobError(
            f"--timeline-merge {given.timeline_merge} has no effect: {setting.set_name(environ)}={pattern} is of rank "
            f"0; name one for each rank, like --timeline-filename 't-{RANK_MARK}.json', or none"
        )
    return TimelineMerge(given.timeline_merge, pattern)


def start_timeout(given: float | None, environ: Mapping[str, str]) -> float:
    """The value of ``--start-timeout`` in seconds, or else of ``HORO_START_TIMEOUT``, or its default.

    Raises:
        JobError: the variable is not a number of seconds; names it and its value.
    """
    if given is not None:
        return given
    return float(_read(variables_of(Config)["start_timeout_s"], environ, ""))


def own_switch(name: str, environ: Mapping[str, str]) -> bool | None:
    """The value of a variable for hororun itself, such as ``HORO_SUMMARY``; None: it is not set.

    Args:
        name: of its field in ``HororunVariables``.
        environ: has the variable.

    Raises:
        JobError: it is neither 0 nor 1; names it and its value.
    """
    value: bool | None = _read(variables_of(HororunVariables)[name], environ, "")
    return value


def port_range(environ: Mapping[str, str]) -> range | None:
    """The ports on which horo may listen, in the environment of the ranks; None: any.

    Raises:
        JobError: ``HORO_PORT_RANGE`` is no range of ports; names it and its value.
    """
    text = _read(variables_of(Config)["port_range"], environ, "")
    return None if text is None else parse_ports(text)


def _check(environ: Mapping[str, str], prefix: str) -> None:
    for variable in variables_of(Config).values():
        _read(variable, environ, prefix)


def _read(variable: Variable, environ: Mapping[str, str], prefix: str) -> Any:
    try:
        return variable.read(environ)
    except UsageError as error:
        raise JobError(f"{prefix}{error}") from None
