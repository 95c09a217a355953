"""The options of hororun. Imports little, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from horo import version
from horo.config.table import Config, Option, Variable, variables_of
from horo.runner.cli.option_types import (
    at_least,
    comma_list,
    filled,
    integer,
    listening,
    one_of,
    port,
    positive_seconds,
    seconds,
)
from horo.runner.config import BINDINGS, EXIT_USAGE, LAUNCHERS, JobError
from horo.runner.stdout import show

__all__ = ["CommandLine", "build_parser", "check_known", "split_command"]

_USAGE = "hororun [-np N] [-H h1:4,h2:4 | --hostfile FILE] [options] [--] train.py | -m module | command ..."
_DESCRIPTION = "Runs N copies of a command, called ranks, on this host or several, and ends them together."
_EPILOG = """examples:
  hororun -np 4 train.py                      four ranks here (at most one per core or GPU)
  hororun -np 8 -H h1:4,h2:4 train.py         four on each of two hosts, over ssh
  hororun -np 8 --hostfile hosts -x DATA train.py --epochs 3
  hororun train.py                            in a job of Slurm, LSF, PBS or SGE: a rank for each of its slots
  hororun --mpi -np 8 -H h1:4,h2:4 train.py   the same, started by mpirun

A script, train.py, and a module, -m package.train, run under the Python of hororun; any other command as it is.

Exit code: that of the rank that failed first (128 + n for a signal), 130 after Ctrl-C, 2 for a wrong command line,
126 or 127 when the command cannot be executed or found, 69 when a host cannot be reached or is lost, 78 when a host
lacks Python, horo or the directory; with --mpi, that of mpirun. All of it:
{page}"""
_REFUSED = {
    "--autotune-gaussian-process-noise": (1, "horo's search has no Gaussian process"),
    "--disable-cache": (0, "hororun keeps no cache of earlier checks"),
    "--gloo-timeout-seconds": (1, "horo has no gloo: see --start-timeout and --stall-check-shutdown-time-seconds"),
    "--mpi-threads-disable": (0, "horo's core is a thread of its own and asks MPI for what it needs"),
    "--no-mpi-threads-disable": (0, "horo always asks MPI for the threads it needs"),
}
"""Options of horovodrun that horo has no use for, with the number of values and the reason."""
_REFUSED |= {
    f"--{no}{name}": (0, f"horo {does} inside each host first by itself")
    for no in ("", "no-")
    for name, does in (
        ("hierarchical-allreduce", "reduces"),
        ("hierarchical-allgather", "gathers"),
        ("torus-allreduce", "reduces"),
    )
}
_REFUSED |= dict.fromkeys(
    ("--log-with-timestamp", "--log-without-timestamp", "--log-hide-timestamp", "--no-log-hide-timestamp"),
    (0, "horo's log has no times; --prefix-timestamp puts one before every line"),
)
_REFUSED["--num-nccl-streams"] = (1, "horo gives NCCL the tensors as one group, on one stream of its own")
_REFUSED["--thread-affinity"] = (1, "--bind-to core gives each rank its share of the cores; see also --no-move-ranks")
_LETTERS_MIN = 4
_NAMES_MAX = 3
_NUMBERS = r"\s*[+-]?\d*\.?\d+([eE][+-]?\d+)?(\s*,\s*\d+)*\s*"
"""A value of an option that only tunes; several cores for ``--thread-affinity``."""


class _Parser(argparse.ArgumentParser):
    for_horovod = False
    """Whether this is horovodrun."""
    passed_over: tuple[str, ...] = ()
    """A sentence for each option that only tunes Horovod."""
    raising = False
    """Whether an error is raised, and does not end the program."""
    file = ""
    """Of ``--config-file``."""
    from_file: frozenset[str] = frozenset()
    """The destinations of the options that it has."""

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument ([^\s/:]+)\S*: ", r"\1: ", message)  # which lists all spellings of the option
        action = self._option_string_actions.get(message.partition(":")[0])
        if action is not None and action.dest in self.from_file:
            message = f"--config-file {self.file}: {message}"
        if self.raising:
            raise JobError(message)
        self.exit(EXIT_USAGE, f"hororun: {message} (try 'hororun --help')\n")


class _Refuse(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, _given: object, values: object, option: str | None = None
    ) -> None:
        reason = _REFUSED[option or ""][1]
        for text in values if isinstance(values, list) else ():
            if not re.fullmatch(_NUMBERS, text):
                parser.error(f"{option}: {text!r} is not a number")
        if isinstance(parser, _Parser):
            parser.passed_over += (f"{option} does nothing here: {reason}",)


class _Once(argparse.Action):
    """Stores its value; a second one would replace the first without a word."""

    def __call__(
        self, parser: argparse.ArgumentParser, given: argparse.Namespace, value: object, option: str | None = None
    ) -> None:
        if getattr(given, self.dest) is not None:
            parser.error(f"{option} is given twice: name all hosts in one {self.metavar}")
        setattr(given, self.dest, value)


class _Show(argparse.Action):
    """Shows ``const``, or else the help, and ends; argparse's own actions ignore that stdout cannot be written."""

    def __call__(
        self, parser: argparse.ArgumentParser, _given: object, _value: object, _option: str | None = None
    ) -> None:
        text = self.const or parser.format_help().rstrip("\n")
        if self.dest == "version" and isinstance(parser, _Parser) and parser.for_horovod:
            text = version.HOROVOD_VERSION  # what horovod.__version__ is there
        show(text)
        parser.exit()


def build_parser() -> _Parser:
    """All options; the command is split off before."""
    parser = _Parser(
        prog="hororun",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EPILOG.replace("{page}", str(Path(version.__file__).with_name("hororun.md"))),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=38, width=100),
        allow_abbrev=False,
        add_help=False,
    )
    _add_where(parser.add_argument_group("ranks and hosts"))
    _add_elastic(parser.add_argument_group("elastic jobs"))
    _add_launcher(parser.add_argument_group("how ranks are started"))
    _add_environment(parser.add_argument_group("environment"))
    _add_output(parser.add_argument_group("output"))
    _add_times(parser.add_argument_group("times"))
    _add_ssh(parser.add_argument_group("remote hosts"))
    _add_mpi(parser.add_argument_group("mpirun"))
    _add_tuning(parser.add_argument_group("training (each sets a HORO_ variable for the ranks)"))
    _add_information(parser.add_argument_group("information"))
    for name, (values, _reason) in _REFUSED.items():
        parser.add_argument(name, action=_Refuse, nargs=values, dest="refused", help=argparse.SUPPRESS)
    return parser


def _add_where(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-np",
        "-n",
        "--num-proc",
        type=integer,
        metavar="N",
        help="number of ranks; in a batch job, default: all slots",
    )
    hosts = group.add_mutually_exclusive_group()
    hosts.add_argument(
        "-H",
        "--hosts",
        action=_Once,
        metavar="HOSTS",
        help="[user@]host[:slots][:port=P], ...; default: those of the batch job, or this one",
    )
    hosts.add_argument(
        "--hostfile", "-hostfile", action=_Once, type=filled, metavar="FILE",
        help="a host per line: [user@]host [slots=N] [port=P]  # comment",
    )  # fmt: skip
    group.add_argument(
        "--oversubscribe", action="store_true", help="allow more ranks than slots (default slots: GPUs, else cores)"
    )


def _add_elastic(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--min-np", "--min-num-proc", type=at_least(1), metavar="N",
        help="if ranks fail, at least N go on, in hvd.elastic.run, and others replace those that have failed",
    )  # fmt: skip
    group.add_argument(
        "--max-np", "--max-num-proc", type=at_least(1), metavar="N", help="ranks to grow to; default: those of -np"
    )
    group.add_argument(
        "--reset-limit", type=at_least(0), metavar="N", help="how often ranks may be placed anew; default: any number"
    )
    group.add_argument(
        "--elastic-timeout", type=positive_seconds, metavar="S",
        help="wait for so long while fewer than --min-np ranks are there; default: 600",
    )  # fmt: skip
    group.add_argument(
        "--host-discovery-script", type=filled, metavar="CMD",
        help="run CMD again and again: it prints the hosts of the job, host or host:slots on each line",
    )  # fmt: skip
    group.add_argument(
        "--slots-per-host", type=at_least(1), metavar="N",
        help="slots of a host that CMD prints without; default: its GPUs, else its cores",
    )  # fmt: skip
    group.add_argument(
        "--elastic-join", type=one_of(("ready", "now")), metavar="WHEN",
        help="interrupt ranks when others are ready to join, or now, when they are started; default: ready",
    )  # fmt: skip
    group.add_argument(
        "--on-failure", type=one_of(("slot", "host")), metavar="WHAT",
        help="leave alone for a while the slot of a rank that fails, or all of its host; default: slot",
    )  # fmt: skip
    group.add_argument(
        "--blacklist-cooldown-range", type=at_least(1), nargs=2, metavar="S",
        help="shortest and longest time for which a host is left alone, twice as long each time; default: 10 600",
    )  # fmt: skip
    group.add_argument(
        "--elastic-dir", metavar="DIR",
        help="on SIGTERM, ranks end at their next commit, which is kept in DIR; a job that starts with DIR goes on",
    )  # fmt: skip


def _add_launcher(group: argparse._ArgumentGroup) -> None:
    ways = group.add_mutually_exclusive_group()
    ways.add_argument(
        "--launcher", type=one_of(LAUNCHERS), default="auto", metavar="WAY",
        help="ssh, slurm (srun), mpi (mpirun) or jsrun; default: auto, slurm or jsrun in such a job, else ssh",
    )  # fmt: skip
    ways.add_argument("--gloo", dest="launcher", action="store_const", const="ssh", help="--launcher ssh")
    ways.add_argument("--mpi", dest="launcher", action="store_const", const="mpi", help="--launcher mpi")
    ways.add_argument("--jsrun", dest="launcher", action="store_const", const="jsrun", help="--launcher jsrun")
    group.add_argument(
        "--bind-to", type=one_of(BINDINGS), default="none", metavar="WHAT",
        help="core or numa: each rank to its share of its host's cores or NUMA nodes; default: none",
    )  # fmt: skip
    group.add_argument(
        "--bind-gpus", action="store_true", help="each rank sees its share of its host's GPUs only, as cuda:0, ..."
    )
    group.add_argument(
        "--horovod",
        action="store_true",
        help="for a script written for Horovod: 'import horovod.torch' gives horo.torch",
    )
    group.add_argument("--dry-run", action="store_true", help="show what would be run and run nothing")


def _add_environment(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-x", dest="exports", action="append", default=[], metavar="NAME[=VALUE]",
        help="set a variable for all ranks; NAME alone: as it is here",
    )  # fmt: skip
    group.add_argument(
        "--network-interfaces", "--network-interface", action="extend", type=comma_list, default=[], metavar="A,B",
        help="use these interfaces or networks (eth0,10.1.0.0/16) instead of those that route to the peers",
    )  # fmt: skip
    group.add_argument(
        "--store-port", type=port, default=0, metavar="P", help="port where ranks meet; default: a free one"
    )
    group.add_argument(
        "--no-torch-env", action="store_true",
        help="do not set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT: a "
        "trainer that finds them wraps the model in DistributedDataParallel",
    )  # fmt: skip
    group.add_argument(
        "--master-port",
        type=port,
        default=0,
        metavar="P",
        help="MASTER_PORT for torch.distributed; default: a free one",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--no-prefix", action="store_true", help="do not begin lines with their rank")
    group.add_argument(
        "--prefix-timestamp",
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        help="begin lines with the time, too",
    )
    group.add_argument(
        "--prefix-host", action="store_true", help="begin lines with rank and host; in DIR below: rank.N.HOST"
    )
    group.add_argument(
        "--output", type=one_of(("all", "rank0")), default="all", metavar="WHOSE",
        help="rank0: show the lines of rank 0 only, and the last ones of a rank that fails; default: all",
    )  # fmt: skip
    group.add_argument(
        "--output-filename",
        type=filled,
        metavar="DIR",
        help="also write DIR/rank.N/stdout and stderr, byte for byte",
    )
    group.add_argument(
        "--timeline-merge", type=filled, metavar="FILE",
        help="have each rank write a timeline, and put them into one file at the end, with arrows to ranks that waited",
    )  # fmt: skip
    group.add_argument(
        "--json-report", type=filled, metavar="FILE",
        help="at the end, write how the job has gone: ends of ranks, generations of elastic jobs, the cause",
    )  # fmt: skip
    card = group.add_mutually_exclusive_group()
    card.add_argument(
        "--summary", action="store_true",
        help="at the end, tell on stderr where the time of a step went; default: on a terminal, or by HORO_SUMMARY",
    )  # fmt: skip
    card.add_argument("--no-summary", action="store_true", help="never")
    group.add_argument(
        "--live", action="store_true",
        help="show steps per second, waiting, late ranks and memory while the job runs; also by HORO_LIVE=1",
    )  # fmt: skip
    group.add_argument(
        "--metrics-port", type=listening, metavar="[ADDR:]P",
        help="serve the same numbers for Prometheus at http://127.0.0.1:P/metrics, or at another address",
    )  # fmt: skip
    group.add_argument("--verbose", action="store_true", help="describe the steps of hororun on stderr")


def _add_times(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--grace-seconds", type=seconds, metavar="S", help="from SIGTERM to SIGKILL; default: 5, in batch jobs 25"
    )
    group.add_argument(
        "--failure-seconds", type=seconds, default=1.0, metavar="S",
        help="from the first failure to SIGTERM, so that the others see their error; default: 1",
    )  # fmt: skip
    group.add_argument(
        "--start-timeout", type=positive_seconds, metavar="S",
        help="for all hosts to answer, and for init(); default: $HORO_START_TIMEOUT or 60",
    )  # fmt: skip
    group.add_argument(
        "--host-timeout", type=positive_seconds, default=45.0, metavar="S",
        help="a remote host silent for so long is lost; default: 45",
    )  # fmt: skip


def _add_ssh(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-p", "--ssh-port", type=port, metavar="P", help="port of ssh where a host names none")
    group.add_argument("-i", "--ssh-identity-file", type=filled, metavar="FILE", help="private key for ssh")
    group.add_argument("--ssh-args", default="", metavar="'ARGS'", help="further arguments for ssh, as one word")
    group.add_argument(
        "--remote-shell",
        type=filled,
        default="ssh",
        metavar="PROGRAM",
        help="instead of ssh, with the same arguments",
    )
    group.add_argument(
        "--remote-python", type=filled, metavar="PATH", help="Python on remote hosts; default: this one's path"
    )


def _add_mpi(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--mpirun", type=filled, metavar="PROGRAM", help="default: the first of mpirun and mpiexec in PATH"
    )
    group.add_argument("--mpi-args", default="", metavar="'ARGS'", help="further arguments for mpirun, as one word")
    group.add_argument(
        "--binding-args", metavar="'ARGS'", help="how mpirun maps and binds ranks, as one word; default: not bound"
    )
    group.add_argument("--tcp", action="store_true", help="Spectrum MPI: TCP only")


def _add_tuning(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--config-file", type=filled, metavar="FILE", help="take options from YAML in Horovod's form; those here win"
    )
    group.add_argument("--no-keep-memory", action="store_true", help="let malloc return freed memory to the kernel")
    for variable in variables_of(Config).values():
        _add_options(group, variable)


def _add_options(group: argparse._ArgumentGroup, variable: Variable) -> None:
    """The options that only set this variable; the value of one is the text of the variable."""
    own = [option for option in variable.options if not option.is_shared]
    place = group.add_mutually_exclusive_group() if len(own) > 1 else group
    for option in own:
        if option.metavar:
            place.add_argument(
                option.name, type=_text_for(variable, option), metavar=option.metavar, help=option.meaning
            )
        else:
            place.add_argument(option.name, action="store_true", help=option.meaning)


def _text_for(variable: Variable, option: Option) -> Callable[[str], str]:
    def convert(text: str) -> str:
        try:
            return variable.text_of_option(option, filled(text))
        except ValueError:
            allowed = variable.of_option(option).allowed()
            raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}") from None

    return convert


def _add_information(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-h", "--help", action=_Show, nargs=0, help="show this text")
    group.add_argument(
        "-v", "--version", action=_Show, nargs=0, const=f"hororun {version.__version__}", help="show the version"
    )
    group.add_argument(
        "--check-hosts", action="store_true", help="a line for each host: whether ranks can start there and connect"
    )
    group.add_argument("--attach", type=at_least(1), metavar="PID", help="show the course of the job of hororun PID")
    group.add_argument("--stacks", action="store_true", help="where its ranks stand, beside --attach PID; then end")
    group.add_argument(
        "-cb", "--check-build", action="store_true", help="show what this installation can do, and where it is"
    )
    group.add_argument(
        "--bench", action="store_true",
        help="instead of a command, measure what these ranks can exchange",
    )  # fmt: skip


class CommandLine(NamedTuple):
    """The words of a command line.

    Attributes:
        options: those of hororun.
        command: of the ranks.
        given: by destination, the options as the user spelt them.
        from_file: destinations of those that ``--config-file`` stands for.
    """

    options: list[str]
    command: list[str]
    given: dict[str, str]
    from_file: frozenset[str] = frozenset()


def split_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> CommandLine:
    """Cuts before the command: ``-m``, the first word that is neither an option nor the value of one, or after ``--``.

    argparse cannot: its remainder swallows unknown options, and differs between versions of Python. Nor does it read
    ``-np2``, which becomes ``-np=2``.
    """
    actions = {name: action for action in parser._actions for name in action.option_strings}
    given: dict[str, str] = {}
    arguments = list(arguments)
    index = 0
    while index < len(arguments):
        word = arguments[index] = re.sub(r"^(-np?)(\d+)$", r"\1=\2", arguments[index])
        if word == "--":
            return CommandLine(arguments[:index], arguments[index + 1 :], given)
        if not word.startswith("-") or word in ("-", "-m"):
            break
        index += 1
        name = next((name for name in (word.partition("=")[0], word[:2]) if name in actions), "")  # -p22 is -p 22
        if name:
            action = actions[name]
            given[action.dest] = name
            if word == name:
                index += action.nargs if isinstance(action.nargs, int) else 1
    return CommandLine(arguments[:index], arguments[index:], given)


def check_known(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Ends hororun if there are words that are no options; ``unknown``: those that argparse did not take."""
    if not unknown:
        return
    word = unknown[0].partition("=")[0]
    actions = [action for action in parser._actions if action.dest != "refused"]
    spellings = {name for action in actions for name in action.option_strings}
    similar = _similar(word, sorted(name for name in spellings if f"-{name}" not in spellings))  # -hostfile: --hostfile
    hint = " or ".join(filter(None, (", ".join(similar[:-1]), *similar[-1:])))
    parser.error(f"there is no option {word!r}" + (f": did you mean {hint}?" if hint else ""))


def _similar(word: str, names: Sequence[str]) -> list[str]:
    """The options that a word may stand for, three at most. Of two or three letters any would be similar to some."""
    letters = sorted(word.strip("-"))
    same = [name for name in names if sorted(name.strip("-")) == letters]
    if same or len(letters) < _LETTERS_MIN:
        return same[:1]
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.85)
    begun = [name for name in names if name.startswith(word)]
    if close or not 0 < len(begun) <= _NAMES_MAX:
        return close or difflib.get_close_matches(word, names, n=1, cutoff=0.65)
    return begun
