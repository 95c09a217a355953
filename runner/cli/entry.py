"""The command line of hororun. Imports little, so that ``--help`` answers at once."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from horo.horovod.environment import is_switched_on
from horo.runner.agent.protocol import PING_S
from horo.runner.cli.combinations import (
    check_combinations,
    check_elastic,
    check_launcher,
    check_one_host,
    useless_for_horovod,
)
from horo.runner.cli.options import CommandLine, build_parser, check_known, split_command
from horo.runner.config import BATCH_GRACE_S, GRACE_S, Elastic, Job, JobError, Mpi, OutputOptions, Ssh
from horo.runner.hosts import HostsError, HostSpec, parse_host_file, parse_hosts
from horo.runner.stdout import show
from horo.runner.text import printable_lines

if TYPE_CHECKING:
    import argparse

    from horo.runner.start.allocation import Allocation

__all__ = ["parse", "run"]

_COOLDOWN_MAX_S = 3600
_HOST_TIMEOUT_MIN_S = 3 * PING_S


def run(arguments: Sequence[str] | None, *, for_horovod: bool) -> int:
    """Runs hororun, or horovodrun, and returns its exit code."""
    try:
        words = sys.argv[1:] if arguments is None else arguments
        job = parse(words, for_horovod=for_horovod)
        if job is None:
            from horo.runner.cli.check_build import check_build  # noqa: PLC0415 - looks at the core and at torch

            return check_build(for_horovod or "--horovod" in words)  # no other word has a place beside it
        for sentence in job.passed_over:
            _say(f"warning: {sentence}")
        if job.timelines is None or job.dry_run:
            return _run(job)
        from horo.runner.job.merge_timelines import run_and_merge  # noqa: PLC0415 - --help does without

        return run_and_merge(job.timelines, job.size, lambda: _run(job), _say)
    except JobError as error:
        reader_left = error.code == 128 + signal.SIGPIPE  # nothing to tell, as with ``| head``
        if not reader_left:
            _say(str(error))
        return error.code


def _say(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"hororun: {printable_lines(text)}\n")


def _run(job: Job) -> int:
    if job.attach:
        from horo.runner.cli.attach import attach  # noqa: PLC0415 - --help does without

        return attach(job.attach, stacks=job.stacks)
    if job.launcher in ("mpi", "jsrun"):
        from horo.runner.job.external_launcher import run_external  # noqa: PLC0415 - --help does without

        return run_external(job, os.environ)
    if job.check_hosts:
        from horo.runner.cli.check_hosts import check_hosts  # noqa: PLC0415 - --help does without

        return check_hosts(job, os.environ)
    if job.dry_run:
        from horo.runner.cli.dry_run import dry_run  # noqa: PLC0415 - --help does without

        show(dry_run(job, os.environ))
        return 0
    from horo.runner.job.whole_job import run_job  # noqa: PLC0415 - --help does without

    if job.elastic is not None:
        from horo.runner.elastic.supervisor import ElasticSupervisor  # noqa: PLC0415 - --help does without

        return run_job(job, os.environ, ElasticSupervisor)
    return run_job(job, os.environ)


def parse(
    arguments: Sequence[str],
    *,
    for_horovod: bool = False,
    environment: Mapping[str, str] | None = None,
    raising: bool = False,
) -> Job | None:
    """The job that the command line asks for; None: ``--check-build``.

    Args:
        arguments: of hororun.
        for_horovod: as if ``--horovod`` were among them.
        environment: of hororun; None: that of this process.
        raising: an unknown option, or one without its value, is a JobError, too.

    Raises:
        JobError: a value is wrong; names it.
        SystemExit: ``--help`` and ``--version`` were answered, or an option is unknown or lacks its value.
    """
    from horo.runner.cli import autotune_options as tuning  # noqa: PLC0415 - --help does without

    environment = os.environ if environment is None else environment
    given, line, passed_over = _read(arguments, for_horovod, raising)
    command = line.command
    check_combinations(line.given, command)
    if given.check_build:
        return None
    command = _bench(given, command) if given.bench else command
    if given.attach:
        return Job(size=0, command=(), attach=given.attach, stacks=given.stacks)
    _check_words(given, command)
    without_effect = _check_elastic(given, line)
    where = _where(given, line, environment)
    timeout_s = tuning.start_timeout(given.start_timeout, environment)
    elastic = _elastic(given, where.size, timeout_s)
    exports, useless = _exports(given, line, environment)
    return Job(
        size=where.size if elastic is None else elastic.size,
        command=tuple(command),
        hosts=where.hosts,
        hosts_from=where.source,
        in_batch=where.in_batch,
        launcher=where.launcher,
        oversubscribe=given.oversubscribe or _fits_any_number(given, where, environment),
        grace_s=(BATCH_GRACE_S if where.in_batch else GRACE_S) if given.grace_seconds is None else given.grace_seconds,
        failure_s=given.failure_seconds,
        start_timeout_s=timeout_s,
        host_timeout_s=given.host_timeout,
        interfaces=tuple(given.network_interfaces),
        ports=tuning.port_range({**environment, **exports}),
        store_port=given.store_port,
        torch_env=elastic is None and not given.no_torch_env,
        master_port=given.master_port,
        bind_to=given.bind_to,
        bind_gpus=given.bind_gpus,
        keep_memory=not given.no_keep_memory,
        exports=exports,
        sources=tuning.tuning_sources(given, line.from_file, given.config_file),
        passed_over=(*passed_over, *where.passed_over, *without_effect, *useless),
        dry_run=given.dry_run,
        check_hosts=given.check_hosts,
        python=given.remote_python or sys.executable,
        ssh=Ssh(
            program=given.remote_shell,
            port=given.ssh_port,
            identity_file=given.ssh_identity_file,
            arguments=_words("--ssh-args", given.ssh_args),
        ),
        mpi=Mpi(
            program=given.mpirun,
            arguments=_words("--mpi-args", given.mpi_args),
            binding=None if given.binding_args is None else _words("--binding-args", given.binding_args),
            tcp=given.tcp,
        ),
        output=_output(given, environment),
        timelines=tuning.timeline_merge(given, {**environment, **exports}),
        json_report=given.json_report or "",
        summary=given.summary or (False if given.no_summary else tuning.own_switch("summary", environment)),
        live=given.live or bool(tuning.own_switch("live", environment)),
        metrics=given.metrics_port,
        elastic=elastic,
    )


def _bench(given: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """The command of ``--bench``, whose table is shown as it is."""
    from horo.bench.options import BenchOptionError, command_of  # noqa: PLC0415 - --help does without

    given.no_prefix = not given.prefix_timestamp
    try:
        return command_of(words)
    except BenchOptionError as error:
        raise JobError(f"--{error}") from None


def _check_words(given: argparse.Namespace, command: Sequence[str]) -> None:
    """Raises JobError if there is no rank to start, or nothing that it could run."""
    if given.num_proc is not None and given.num_proc < 1:
        raise JobError(f"-np {given.num_proc}: at least one rank is needed")
    if given.num_proc is None:
        _check_order(command)
    if command or not given.check_hosts:
        _check_command(command)


def _check_elastic(given: argparse.Namespace, line: CommandLine) -> tuple[str, ...]:
    """As ``check_elastic``. A job whose hosts are discovered is elastic without ``--min-np``, too."""
    without_effect = check_elastic(line.given, for_horovod=given.horovod)
    if given.host_discovery_script is not None and given.min_np is None:
        given.min_np = given.num_proc
        if given.min_np is None:
            raise JobError("how many ranks? --host-discovery-script needs --min-np N, or -np N")
    return without_effect


def _elastic(given: argparse.Namespace, size: int, start_timeout_s: float) -> Elastic | None:
    """The limits of an elastic job, None for another one. ``size``: of the job, by ``-np`` or by its slots."""
    if given.min_np is None:
        return None
    size = size if given.num_proc is not None else min(size, given.max_np or size)
    low, high = given.min_np, given.max_np or size
    if not low <= size <= high:
        what = f"-np {size}" if given.num_proc is not None else f"{size} ranks"
        raise JobError(f"{what} must lie between --min-np {low} and --max-np {high}")
    timeout_s = 600.0 if given.elastic_timeout is None else given.elastic_timeout
    if given.host_timeout < _HOST_TIMEOUT_MIN_S:
        raise JobError(
            f"--host-timeout {given.host_timeout:g} is too short for an elastic job, whose hosts send something each "
            f"second: at least {_HOST_TIMEOUT_MIN_S:g}"
        )
    shortest, longest = given.blacklist_cooldown_range or (10, 600)
    if not shortest <= longest <= _COOLDOWN_MAX_S:
        raise JobError(
            f"--blacklist-cooldown-range {shortest} {longest}: the first must be at most the second, "
            f"and that at most {_COOLDOWN_MAX_S} s"
        )
    return Elastic(
        size,
        low,
        high,
        given.reset_limit,
        timeout_s,
        start_timeout_s,
        script=given.host_discovery_script or "",
        slots_per_host=given.slots_per_host,
        cooldown_s=(shortest, longest),
        on_failure=given.on_failure or ("host" if given.horovod else "slot"),
        join=given.elastic_join or ("now" if given.horovod else "ready"),
        keeps=given.elastic_dir is not None,
    )


def _fits_any_number(given: argparse.Namespace, where: _Where, environment: Mapping[str, str]) -> bool:
    """Whether this host, for which nobody has asked, takes as many ranks as are asked for: Horovod's default."""
    is_here = given.hosts is None and given.hostfile is None and not given.host_discovery_script and not where.source
    return is_here and (given.horovod or is_switched_on(environment))


def _output(given: argparse.Namespace, environment: Mapping[str, str]) -> OutputOptions:
    return OutputOptions(
        prefix=not given.no_prefix,
        timestamp=given.prefix_timestamp,
        streams=given.horovod or is_switched_on(environment),
        host=given.prefix_host,
        directory=given.output_filename,
        first_only=given.output == "rank0",
        verbose=given.verbose,
    )


def _read(
    arguments: Sequence[str], for_horovod: bool, raising: bool
) -> tuple[argparse.Namespace, CommandLine, tuple[str, ...]]:
    """The values of all options, the words, and a sentence for each option that is passed over."""
    parser = build_parser()
    parser.raising = raising
    line = split_command(parser, arguments)
    parser.for_horovod = for_horovod or "horovod" in line.given
    given, unknown = parser.parse_known_args(line.options)
    if given.config_file is not None and not unknown:
        line = _with_file(parser, line, given.config_file)
        parser.for_horovod |= "horovod" in line.given
        parser.passed_over = ()
        parser.file, parser.from_file = given.config_file, line.from_file
        given, unknown = parser.parse_known_args(line.options)
    given.horovod = parser.for_horovod
    check_known(parser, unknown)
    return given, line, parser.passed_over


def _with_file(parser: argparse.ArgumentParser, line: CommandLine, path: str) -> CommandLine:
    """The command line with the options of ``--config-file`` before its own."""
    from horo.runner.cli.config_file import config_words  # noqa: PLC0415 - --help does without

    spellings = {
        name: each.dest
        for each in parser._actions
        for name in each.option_strings
        if each.dest not in ("refused", "config_file")
    }
    added = split_command(parser, config_words(path, line.given, spellings))
    given = {**line.given, **{name: f"{option} (in {path})" for name, option in added.given.items()}}
    return CommandLine(added.options + line.options, line.command, given, frozenset(added.given))


def _check_order(command: Sequence[str]) -> None:
    """Raises JobError if the number of ranks was not given but stands after the command."""
    begins = 2 if command[:1] == ["-m"] else 1
    for word in command[begins:]:
        if re.fullmatch(r"(-np?|--num-proc)(=?\d+)?", word):
            raise JobError(
                f"{word!r} stands after the command {' '.join(command[:begins])!r} and belongs to it: "
                "options of hororun come before the command"
            )


def _check_command(command: Sequence[str]) -> None:
    """Raises JobError if the words name nothing that could be run."""
    if not command:
        raise JobError("no command given: say what to run, like 'hororun -np 2 train.py'")
    if not command[0]:
        raise JobError("the command is an empty word: say what to run, like 'hororun -np 2 train.py'")
    if command[0] == "-m" and not "".join(command[1:2]):
        raise JobError("-m needs the name of a module, like 'hororun -np 2 -m package.train'")


class _Where(NamedTuple):
    size: int
    hosts: tuple[HostSpec, ...]
    source: str
    launcher: str
    in_batch: bool
    passed_over: tuple[str, ...]
    """A sentence for each option that does nothing in this job, as it may for Horovod's scripts."""


def _where(given: argparse.Namespace, line: CommandLine, environment: Mapping[str, str]) -> _Where:
    """Hosts, their origin, the number of ranks and the launcher, as far as the command line leaves them open."""
    from horo.runner.start.launcher import allocated, choose_launcher  # noqa: PLC0415 - --help does without

    named = () if given.host_discovery_script is not None else _hosts(given)
    misfit = None if named != () or given.launcher == "auto" else check_launcher(line.given, given.launcher)
    if misfit is not None:
        raise JobError(misfit)
    allocation = allocated(environment, named=named is not None)
    fallback = (HostSpec("localhost"),) if allocation is None else allocation.hosts
    hosts = fallback if named is None else named
    source = allocation.source if allocation is not None and named is None else ""
    launcher = choose_launcher(given.launcher, hosts, allocation)
    misfit = check_launcher(line.given, launcher)
    if misfit is not None and given.launcher == "auto" and check_launcher(line.given, "ssh") is None:
        launcher = "ssh"  # an option that only ssh knows has decided
    has_hosts = named is not None or allocation is not None
    useless = useless_for_horovod(line.given, launcher, has_hosts) if given.horovod else {}
    options = {name: option for name, option in line.given.items() if name not in useless}
    misfit = check_launcher(options, launcher)
    if misfit is not None:
        raise JobError(misfit)
    if not has_hosts:
        check_one_host(options)
    size = _size(given, hosts, allocation if named is None else None, environment)
    return _Where(size, hosts, source, launcher, allocation is not None, tuple(useless.values()))


def _size(
    given: argparse.Namespace,
    hosts: Sequence[HostSpec],
    allocation: Allocation | None,
    environment: Mapping[str, str],
) -> int:
    """The number of ranks; 0: hosts have to be asked. ``allocation``: where the hosts come from, if it is one."""
    if given.num_proc is not None:
        return int(given.num_proc)
    if given.host_discovery_script is not None:
        return int(given.min_np)
    if given.check_hosts:
        return 1
    if allocation is not None:
        return allocation.tasks or sum(host.slots or 0 for host in allocation.hosts)
    from horo.runner.job.placement import count_ranks  # noqa: PLC0415 - --help does without

    size = count_ranks(hosts, environment)
    if not size and given.timeline_merge is not None:
        raise JobError("--timeline-merge needs the number of ranks before the job starts: say -np N")
    return size


def _hosts(given: argparse.Namespace) -> tuple[HostSpec, ...] | None:
    """The hosts of ``-H`` or ``--hostfile``; None: neither is there."""
    try:
        if given.hosts is not None:
            return parse_hosts(given.hosts)
        if given.hostfile is not None:
            return parse_host_file(Path(given.hostfile).read_text(encoding="utf-8"), given.hostfile)
    except HostsError as error:
        raise JobError(str(error)) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise JobError(f"--hostfile {given.hostfile}: cannot be read: {reason}") from None
    return None


def _exports(
    given: argparse.Namespace, line: CommandLine, environment: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The variables for all ranks, and sentences about options that do nothing, as they may for Horovod's scripts."""
    from horo.runner.cli.autotune_options import (  # noqa: PLC0415 - --help does without
        add_rank_timelines,
        check_environment,
        check_exports,
        drop_replaced,
        set_all_names,
        tuning_variables,
        useless_marks,
    )
    from horo.runner.job.forwarded_variables import parse_exports  # noqa: PLC0415 - needs what --help does not

    try:
        exports = parse_exports(given.exports, environment)
    except ValueError as error:
        raise JobError(str(error)) from None
    drop_replaced(given, line.from_file, exports)
    add_rank_timelines(given, {**environment, **exports})
    tuning = tuning_variables(given, line.given)
    check_exports(exports, given)
    if given.min_np is not None and given.elastic_dir is not None:
        exports["HORO_ELASTIC_DIR"] = str(Path(given.elastic_dir).absolute())
    exports = set_all_names(exports, environment)
    check_environment({**environment, **tuning, **exports})
    useless = useless_marks(given, {**environment, **tuning, **exports})
    if useless and not given.horovod:
        raise JobError(f"{line.given['timeline_mark_cycles']} has no effect: {useless}: add that, or leave this out")
    if useless:
        tuning = {name: value for name, value in tuning.items() if name != "HORO_TIMELINE_MARK_CYCLES"}
    return tuning | exports, (f"{line.given['timeline_mark_cycles']} does nothing here: {useless}",) if useless else ()


def _words(option: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise JobError(f"{option} {text!r}: {error}") from None
