"""Options that all contests have."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import peers
import report
import spaces
from rounds import Result, probe_values


def parse_peers(text: str) -> list[peers.Peer]:
    """``horo,gloo``: for argparse."""
    words = [word.strip().lower() for word in text.split(",")]
    unknown = [word for word in words if word not in peers.ALL]
    if unknown or len(set(words)) < len(words):
        reason = f"knows no '{unknown[0]}'" if unknown else "names one twice"
        raise argparse.ArgumentTypeError(f"'{text}' {reason}; known are {', '.join(peers.ALL)}")
    return [peers.ALL[word] for word in words]


def add_turns(parser: argparse.ArgumentParser, *, rounds: int, turn_ms: float) -> None:
    """Adds --rounds, --turn-ms and --turn-limit-s."""
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of everybody (default: %(default)s)")
    parser.add_argument("--turn-ms", type=float, default=turn_ms, help="aim for one turn (default: %(default)s)")
    parser.add_argument(
        "--turn-limit-s", type=float, default=120, help="a turn that takes longer ends the run (default: %(default)s)"
    )


def check_turns(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuses what cannot be of `add_turns`."""
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: at least 1")
    for name in ("turn_ms", "turn_limit_s"):
        if not getattr(arguments, name) > 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name):g}: must be more than 0")


def add(parser: argparse.ArgumentParser, *, contestants: str = ",".join(peers.DEFAULT), rounds: int = 11) -> None:
    """Adds --np, --peers, --rounds, --turn-ms, --turn-limit-s, --hosts, --rate, --beside and --json."""
    parser.add_argument("--np", type=int, default=2, help="ranks of every contestant (default: %(default)s)")
    parser.add_argument(
        "--peers", type=parse_peers, default=contestants, metavar="NAMES", help="who takes part (default: %(default)s)"
    )
    add_turns(parser, rounds=rounds, turn_ms=20)
    parser.add_argument(
        "--hosts", type=int, default=1, help="spread the ranks over so many, network namespaces (default: %(default)s)"
    )
    parser.add_argument(
        "--rate", type=spaces.parse_rate, default="10gbit", help="of the hosts' links (default: %(default)s)"
    )
    parser.add_argument(
        "--beside", type=int, default=0, metavar="N", help="so many other programs that compute (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all values there")


_COMPUTING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C comes to it, too, and ends it without a traceback
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def busy_programs(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many that compute all the time; they end with this process, too, however it ends."""
    command = [sys.executable, "-S", "-c", _COMPUTING, str(os.getpid())]
    programs = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield programs
    finally:
        for program in programs:
            program.kill()
            program.wait()


@contextlib.contextmanager
def hosts(arguments: argparse.Namespace) -> Iterator[spaces.Spaces | None]:
    """The hosts to give to a contest, with what runs there besides; None: this one."""
    with contextlib.ExitStack() as stack:
        made = None
        if arguments.hosts > 1:
            made = stack.enter_context(spaces.Spaces(arguments.hosts))
            made.limit(arguments.rate)
        stack.enter_context(busy_programs(arguments.beside))
        yield made


def where(arguments: argparse.Namespace) -> str:
    """For the title of a table."""
    on_hosts = f" on {arguments.hosts} hosts, links of {arguments.rate}" if arguments.hosts > 1 else ""
    programs = "1 program that computes" if arguments.beside == 1 else f"{arguments.beside} programs that compute"
    return on_hosts + (f" beside {programs}" if arguments.beside > 0 else "")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parses and refuses what cannot be."""
    arguments = parser.parse_args(words)
    if arguments.np < 1:
        parser.error(f"--np {arguments.np}: at least 1")
    check_turns(parser, arguments)
    if not 1 <= arguments.hosts <= spaces.COUNT_MAX or arguments.np % arguments.hosts:
        parser.error(
            f"--hosts {arguments.hosts}: 1 to {spaces.COUNT_MAX}, with equal parts of the {arguments.np} ranks (--np)"
        )
    if arguments.beside < 0:
        parser.error(f"--beside {arguments.beside}: not below 0")
    if arguments.hosts > 1 and (reason := spaces.why_not()):
        parser.error(f"--hosts {arguments.hosts}: {reason}")
    return arguments


def finish(
    arguments: argparse.Namespace,
    benchmark: str,
    results: Sequence[Result],
    rows: Sequence[Mapping[str, Any]],
    versions: Mapping[str, Mapping[str, str]],
) -> int:
    """Writes what a contest has measured, where that is asked for. Returns 1 if a result was wrong."""
    report.save(arguments, benchmark, rows, versions=versions, probe_us=probe_values(results))
    return 1 if any(result.wrong for result in results) else 0
