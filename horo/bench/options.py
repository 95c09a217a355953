"""The options of ``horo bench``. Imports neither torch nor the core, since hororun reads them, too."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from horo.bench.operations import OPERATIONS

__all__ = ["ITEM_BYTES", "BenchOptionError", "Beside", "build_parser", "command_of", "read_options", "split_words"]

ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
_SIZE = re.compile(r"(\d{1,9})([KMG]?)", re.IGNORECASE)
_LEAST = 1e-9
_BESIDE = "--beside"


class BenchOptionError(Exception):
    """An option is wrong; the text names it."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BenchOptionError(f"bench: {message}")


Beside = dict[str, Any]
"""Of an earlier job: ``file``, and per step and rank ``bytes``, ``batches`` and ``moving`` in seconds."""


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give bytes, like 4, 64K or 16M")
    return int(found[1]) << _UNITS[found[2].upper()]


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in OPERATIONS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(OPERATIONS)}")
    return list(dict.fromkeys(names))


def _at_least(least: int) -> Any:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return read


def _beside(path: str) -> Beside:
    """The part of a report of ``--json-report`` that is compared."""
    if path.startswith("{"):
        return dict(json.loads(path))  # from ``command_of``
    try:
        report = json.loads(Path(path).read_text("utf-8"))
        training = report["training"]
        step, traffic = training["step"], training["traffic"]
        if step is None or traffic is None:
            raise argparse.ArgumentTypeError(f"{path}: its job has exchanged nothing in steps")
        numbers = {"bytes": traffic["bytes"], "batches": traffic["batches"], "moving": step["moving"]}
        return {"file": path, **{name: max(float(value), _LEAST) for name, value in numbers.items()}}
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, RecursionError):
        raise argparse.ArgumentTypeError(f"{path}: is no report of hororun --json-report") from None


def build_parser() -> argparse.ArgumentParser:
    """The options of ``horo bench`` itself."""
    parser = _Parser(
        prog="horo bench",
        usage="horo bench -np N [options of hororun] [options]",
        description="Measures how long collective operations take on this machine, or these hosts. Times are of the "
        "slowest rank; rates are in GB/s of 1e9 bytes: algbw is size / time, busbw what must cross the busiest link.",
        allow_abbrev=False,
        add_help=False,  # hororun has -hostfile
    )
    parser.add_argument("--help", action="help", help=argparse.SUPPRESS)
    every = ",".join(OPERATIONS)
    parser.add_argument("--operations", type=_names, default=every, metavar="A,B", help=f"default: {every}")
    parser.add_argument("--min", type=_size, default=4, metavar="SIZE", help="smallest tensor (default: 4)")
    parser.add_argument("--max", type=_size, default=64 << 20, metavar="SIZE", help="largest tensor (default: 64M)")
    parser.add_argument("--factor", type=_at_least(2), default=4, help="from one size to the next (default: 4)")
    parser.add_argument("--dtype", choices=ITEM_BYTES, default="float32", help="of the tensors (default: %(default)s)")
    parser.add_argument("--iterations", type=_at_least(1), default=20, help="most calls of each size (default: 20)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of the tensors; default: cuda if there is a GPU")
    parser.add_argument(
        _BESIDE, type=_beside, metavar="REPORT", help="compare with a job, by its file of --json-report"
    )
    return parser


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The values of all options.

    Raises:
        BenchOptionError: one is wrong.
        SystemExit: ``--help`` was answered.
    """
    given, others = build_parser().parse_known_args(words)
    if others:
        advice = "" if set(others[0].split(",")) - set(OPERATIONS) else f"; give --operations {others[0]}"
        raise BenchOptionError(f"bench: {others[0]!r} is no option{advice}")
    if given.max < given.min:
        raise BenchOptionError(f"bench: --max {given.max} is below --min {given.min}")
    return given


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of hororun, and those of the measurement.

    Raises:
        BenchOptionError, SystemExit: as ``read_options``.
    """
    words = list(words)
    if "--" in words:
        place = words.index("--")
        return words[:place], words[place + 1 :]
    parser = build_parser()
    _, others = parser.parse_known_args(words)
    own, rest = [], list(others)
    for word in words:  # what argparse has not taken is hororun's; both are in their order
        if rest and word == rest[0]:
            del rest[0]
        else:
            own.append(word)
    return others, own


def command_of(words: Sequence[str]) -> list[str]:
    """The command of the ranks, with the values of files in place of their names: these may be on another host.

    Raises:
        BenchOptionError, SystemExit: as ``read_options``.
    """
    given = read_options(words)
    command = ["-m", "horo.bench"]
    is_value = False
    for word in words:
        if not is_value and not word.startswith(f"{_BESIDE}="):
            command += [word] if word != _BESIDE else []
        is_value = word == _BESIDE and not is_value
    return command if given.beside is None else [*command, _BESIDE, json.dumps(given.beside)]
