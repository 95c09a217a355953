"""Parses Slurm's notation of host lists, ``rack[0-1]n[01-03],x``, and of task counts, ``2(x3),1``; writes ranges.

Pure functions on text. The module imports nothing heavy, so that the launcher can use it as well as the library.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

__all__ = ["HOSTS_MAX", "SPECIAL_STEPS", "parse_counts", "parse_host_list", "ranges", "split_host_list"]

HOSTS_MAX = 1 << 16
"""Most nodes of a Slurm cluster; a list that names more is damaged."""
SPECIAL_STEPS = 0xFFFFFFF0
"""Step numbers from here on are batch scripts and interactive shells, not steps that srun has started."""

_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def parse_host_list(text: str) -> list[str]:
    """The hosts of a list in Slurm's notation, in its order; of several brackets in a name the last varies fastest.

    Args:
        text: names separated by commas; brackets hold numbers and ranges. The first number of a range determines the
            number of digits of all: ``h[1-3,07-10],x``.

    Raises:
        ValueError: the text is no such list, or names more than ``HOSTS_MAX`` hosts; the message names the part.
    """
    hosts: list[str] = []
    for entry in split_host_list(text):
        pieces = _pieces(entry, text)
        count = 1
        for piece in pieces:
            count *= len(piece)
        if len(hosts) + count > HOSTS_MAX:
            raise ValueError(f"the host list {text!r} names more than {HOSTS_MAX} hosts")
        hosts += map("".join, itertools.product(*pieces))
    return hosts


def split_host_list(text: str) -> list[str]:
    """The entries between the commas that are outside of brackets."""
    entries, entry, depth = [], "", 0
    for letter in text.strip():
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            entries.append(entry)
            entry = ""
        else:
            entry += letter
    return [*entries, entry]


def parse_counts(text: str) -> list[int]:
    """The tasks on each host as Slurm writes them: ``2(x3),1`` is ``[2, 2, 2, 1]``.

    Raises:
        ValueError: the text is no list of counts.
    """
    counts: list[int] = []
    for item in text.split(","):
        found = _COUNT.fullmatch(item.strip())
        if found is None:
            raise ValueError(f"{item!r} in {text!r} is no count of tasks such as 4 or 4(x2)")
        repeat = int(found[2] or 1)
        if len(counts) + repeat > HOSTS_MAX:
            raise ValueError(f"{text!r} counts the tasks of more than {HOSTS_MAX} hosts")
        counts += [int(found[1])] * repeat
    return counts


def _pieces(entry: str, text: str) -> list[list[str]]:
    """The alternatives for each piece of one entry: one text outside of brackets, several numbers for brackets."""
    pieces, end = [], 0
    for found in _PIECE.finditer(entry):
        if found.start() != end:
            break
        end = found.end()
        if found[1] is None:
            pieces.append([found[2]])
        else:
            pieces.append([number for item in found[1].split(",") for number in _range(item, text)])
    if end != len(entry) or not entry or any(letter.isspace() for letter in entry):
        raise ValueError(f"{entry!r} in the host list {text!r} is no host or range of hosts such as h[1-3,07-10]")
    return pieces


def _range(item: str, text: str) -> list[str]:
    found = _RANGE.fullmatch(item)
    low, high = (int(found[1]), int(found[2] or found[1])) if found is not None else (1, 0)
    if found is None or high < low:
        raise ValueError(f"{item!r} in the host list {text!r} is no number or range such as 07-10")
    if high - low >= HOSTS_MAX:
        raise ValueError(f"the host list {text!r} names more than {HOSTS_MAX} hosts")
    return [f"{number:0{len(found[1])}d}" for number in range(low, high + 1)]


def ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2,5"``; the numbers ascend."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
