"""The command line of hororun. Imports little, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from horo.runner.config import EXIT_USAGE, Job, JobError, Output, Ssh
from horo.runner.hosts import Host, HostsError, parse_host_file, parse_hosts

from horo import __version__

__all__ = ["build_parser", "main", "parse"]

_USAGE = "hororun -np N [-H h1:4,h2:4 | --hostfile FILE] [options] [--] command ..."
_DESCRIPTION = "Runs N copies of a command, called ranks, on this host or several, and ends them together."
_EPILOG = """examples:
  hororun -np 4 python train.py                      four ranks here (at most one per core or GPU)
  hororun -np 8 -H h1:4,h2:4 python train.py         four on each of two hosts, over ssh
  hororun -np 8 --hostfile hosts -x DATA python train.py --epochs 3

Exit code: that of the rank that failed first (128 + n for a signal), 130 after Ctrl-C, 2 for a wrong command line,
126 or 127 when the command cannot be executed or found, 69 when a host cannot be reached or is lost, 78 when a host
lacks Python, horo or the directory. All of it: docs/reference/hororun.md"""
_LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"hororun: {message} (try 'hororun --help')\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs hororun and returns its exit code."""
    try:
        job = parse(sys.argv[1:] if arguments is None else arguments)
        if job is None:
            from horo.runner.check_build import check_build  # noqa: PLC0415 - looks at the core and at torch

            return check_build()
        from horo.runner.supervise import run_job  # noqa: PLC0415 - --help does without

        return run_job(job, os.environ)
    except JobError as error:
        if sys.stderr is not None:
            sys.stderr.write(f"hororun: {error}\n")
        return error.code


def parse(arguments: Sequence[str]) -> Job | None:
    """What the command line asks for; None: ``--check-build``.

    Raises:
        JobError: a value is wrong; names it.
        SystemExit: ``--help`` and ``--version`` were answered, or an option is unknown or lacks its value.
    """
    parser = build_parser()
    options, command = _split(parser, arguments)
    given = parser.parse_args(options)
    if given.check_build:
        return None
    if given.num_proc is None:
        raise JobError("how many ranks? say -np N (try 'hororun --help')")
    if given.num_proc < 1:
        raise JobError(f"-np {given.num_proc}: at least one rank is needed")
    if not command:
        raise JobError("no command given: say what to run, like 'hororun -np 2 python train.py'")
    return Job(
        size=given.num_proc,
        command=tuple(command),
        hosts=_hosts(given),
        oversubscribe=given.oversubscribe,
        grace_s=given.grace_seconds,
        start_timeout_s=given.start_timeout,
        host_timeout_s=given.host_timeout,
        interfaces=tuple(name for value in given.network_interfaces for name in value.split(",") if name),
        store_port=given.store_port,
        master_port=given.master_port,
        keep_memory=not given.no_keep_memory,
        exports=_exports(given),
        ssh=Ssh(
            program=given.remote_shell,
            port=given.ssh_port,
            identity_file=given.ssh_identity_file,
            arguments=_words("--ssh-args", given.ssh_args),
            python=given.remote_python or sys.executable,
        ),
        output=Output(
            prefix=not given.no_prefix,
            timestamp=given.prefix_timestamp,
            directory=given.output_filename,
            verbose=given.verbose,
        ),
    )


def build_parser() -> argparse.ArgumentParser:
    """All options; the command is split off before."""
    parser = _Parser(
        prog="hororun",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=38, width=100),
        allow_abbrev=False,
        add_help=False,
    )
    _add_where(parser.add_argument_group("ranks and hosts"))
    _add_environment(parser.add_argument_group("environment"))
    _add_output(parser.add_argument_group("output"))
    _add_times(parser.add_argument_group("times"))
    _add_ssh(parser.add_argument_group("remote hosts"))
    _add_tuning(parser.add_argument_group("training (each sets a HORO_ variable for the ranks)"))
    _add_information(parser.add_argument_group("information"))
    return parser


def _add_where(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-np", "--num-proc", type=_integer, metavar="N", help="number of ranks")
    hosts = group.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="HOSTS", help="[user@]host[:slots][:port=P], ...; default: this host")
    hosts.add_argument(
        "--hostfile", "-hostfile", metavar="FILE", help="a host per line: [user@]host [slots=N] [port=P]  # comment"
    )
    group.add_argument(
        "--oversubscribe", action="store_true", help="allow more ranks than slots (default slots: GPUs, else cores)"
    )


def _add_environment(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-x", dest="exports", action="append", default=[], metavar="NAME[=VALUE]",
        help="set a variable for all ranks; NAME alone: as it is here",
    )  # fmt: skip
    group.add_argument(
        "--network-interfaces", "--network-interface", action="append", default=[], metavar="A,B",
        help="use these interfaces instead of those that route to the peers",
    )  # fmt: skip
    group.add_argument(
        "--store-port", type=_port, default=0, metavar="P", help="port where ranks meet; default: a free one"
    )
    group.add_argument("--master-port", type=_port, default=0, metavar="P", help="MASTER_PORT; default: a free one")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--no-prefix", action="store_true", help="do not begin lines with their rank")
    group.add_argument(
        "--prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        help="begin lines with the time, too",
    )
    group.add_argument(
        "--output-filename", metavar="DIR", help="also write DIR/rank.N/stdout and stderr, byte for byte"
    )
    group.add_argument("--verbose", action="store_true", help="say what hororun does")


def _start_timeout() -> str:
    return os.environ.get("HORO_START_TIMEOUT") or os.environ.get("HOROVOD_START_TIMEOUT") or "60"


def _add_times(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--grace-seconds", type=_seconds, default=5.0, metavar="S", help="from SIGTERM to SIGKILL; default: 5"
    )
    group.add_argument(
        "--start-timeout", type=_positive_seconds, default=_start_timeout(), metavar="S",
        help="for all hosts to answer, and for init(); default: $HORO_START_TIMEOUT or 60",
    )  # fmt: skip
    group.add_argument(
        "--host-timeout", type=_positive_seconds, default=30.0, metavar="S",
        help="a remote host silent for so long is lost; default: 30",
    )  # fmt: skip


def _add_ssh(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-p", "--ssh-port", type=_port, metavar="P", help="port of ssh where a host names none")
    group.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    group.add_argument("--ssh-args", default="", metavar="'ARGS'", help="further arguments for ssh, as one word")
    group.add_argument(
        "--remote-shell", default="ssh", metavar="PROGRAM", help="instead of ssh, with the same arguments"
    )
    group.add_argument("--remote-python", metavar="PATH", help="Python on remote hosts; default: this one's path")


def _add_tuning(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--no-keep-memory", action="store_true", help="let malloc return freed memory to the kernel")
    group.add_argument("--fusion-threshold-mb", type=_natural, metavar="MB", help="fuse tensors up to this size")
    group.add_argument("--cycle-time-ms", type=_seconds, metavar="MS", help="wait so long for more tensors to fuse")
    group.add_argument("--cache-capacity", type=_natural, metavar="N", help="responses remembered; 0: none")
    stall = group.add_mutually_exclusive_group()
    stall.add_argument("--no-stall-check", action="store_true", help="never warn about ranks that fall behind")
    stall.add_argument("--stall-check", action="store_true", help="warn (the default), whatever the environment says")
    group.add_argument("--stall-check-warning-time-seconds", type=_natural, metavar="S", help="warn after this time")
    group.add_argument(
        "--stall-check-shutdown-time-seconds", type=_natural, metavar="S", help="give up after this time; 0: never"
    )
    group.add_argument("--log-level", type=str.upper, choices=_LOG_LEVELS, help="|".join(_LOG_LEVELS), metavar="LEVEL")


def _add_information(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-h", "--help", action="help", help="show this text")
    group.add_argument("-v", "--version", action="version", version=f"hororun {__version__}", help="show the version")
    group.add_argument(
        "-cb", "--check-build", action="store_true", help="show what this installation can do, and where it is"
    )


def _split(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cuts before the command: the first word that is neither an option nor the value of one, or after ``--``.

    argparse cannot: its remainder swallows unknown options, and differs between versions of Python.
    """
    takes_value = {name: action.nargs != 0 for action in parser._actions for name in action.option_strings}
    index = 0
    while index < len(arguments):
        word = arguments[index]
        if word == "--":
            return list(arguments[:index]), list(arguments[index + 1 :])
        if not word.startswith("-") or word == "-":
            break
        index += 2 if takes_value.get(word, False) else 1
    return list(arguments[:index]), list(arguments[index:])


def _hosts(given: argparse.Namespace) -> tuple[Host, ...]:
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
    return (Host("localhost"),)


def _exports(given: argparse.Namespace) -> dict[str, str]:
    from horo.runner.environment import parse_exports  # noqa: PLC0415 - needs what --help does not

    exports = {}
    if given.start_timeout != float(_start_timeout()):
        exports["HORO_START_TIMEOUT"] = f"{given.start_timeout:g}"
    if given.fusion_threshold_mb is not None:
        exports["HORO_FUSION_THRESHOLD"] = str(given.fusion_threshold_mb << 20)
    if given.cycle_time_ms is not None:
        exports["HORO_CYCLE_TIME"] = f"{given.cycle_time_ms:g}"
    if given.cache_capacity is not None:
        exports["HORO_CACHE_CAPACITY"] = str(given.cache_capacity)
    if given.no_stall_check or given.stall_check:
        exports["HORO_STALL_CHECK_DISABLE"] = "1" if given.no_stall_check else "0"
    if given.stall_check_warning_time_seconds is not None:
        exports["HORO_STALL_CHECK_TIME_SECONDS"] = str(given.stall_check_warning_time_seconds)
    if given.stall_check_shutdown_time_seconds is not None:
        exports["HORO_STALL_SHUTDOWN_TIME_SECONDS"] = str(given.stall_check_shutdown_time_seconds)
    if given.log_level is not None:
        exports["HORO_LOG_LEVEL"] = given.log_level.lower()
    try:
        return exports | parse_exports(given.exports, os.environ)
    except ValueError as error:
        raise JobError(str(error)) from None


def _words(option: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise JobError(f"{option} {text!r}: {error}") from None


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _natural(text: str) -> int:
    number = _integer(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return number


def _port(text: str) -> int:
    number = _integer(text)
    if not 0 < number < 65536:
        raise argparse.ArgumentTypeError(f"{text} is no port: 1 to 65535")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= number < 1e7:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return number


def _positive_seconds(text: str) -> float:
    number = _seconds(text)
    if number == 0:
        raise argparse.ArgumentTypeError(f"{text} must be more than 0")
    return number
