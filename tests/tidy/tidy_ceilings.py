"""Numbers of the core that may only fall, and the file with their ceilings, ceilings.json.

    python tests/tidy/tidy_ceilings.py           the numbers of now
    python tests/tidy/tidy_ceilings.py --write   lowers the ceilings in the file to them

A number above its ceiling is a finding, and so is one below it, which names the new ceiling.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import tidy_graph
from tidy_files import ROOT

FILE = Path(__file__).with_name("ceilings.json")

DECLARATIONS_MAX = 24
"""Of a header without a row in the file."""

ROOMS: dict[str, tuple[str, str]] = {
    "joining": (r"join|stand_in", r"engine/(join|stand_in)\.c|engine/membership/.*|engine/agree/join\.c"),
    "stranded memory": (r"strand", r"mpi/.*|transport/mpi\.c|node/(node|bury)\.[ch]|context\.c"),
    "NCCL": (r"nccl", r"engine/(by_)?nccl.*|engine/gpu/.*|backend/nccl.*|device/libraries.*"),
}
"""Per subject, the words by which a file names it, and the files that may. Comments do not count."""

SUBJECT_FOLDERS = {"joining": "engine/"}  # the public interface, the wire and context.c name every operation

OTHER_WORDS = {"pthread_join"}

LINES_STEP = 500
FUNCTIONS_STEP = 50
"""Ceilings of what every change moves a little, in steps."""


@dataclass(frozen=True)
class Number:
    """One measured value, and the text that explains it where it is too high."""

    value: int
    why: Callable[[], str] = lambda: ""


def numbers(native: Mapping[str, str]) -> dict[str, Number]:
    """All numbers by name, of the core's sources as `tidy_graph` reads them."""
    found = {
        "lines of native/src": Number(_step(sum(len(text.splitlines()) for text in native.values()), LINES_STEP)),
        "functions of native/src": Number(_step(sum(map(tidy_graph.functions, native.values())), FUNCTIONS_STEP)),
    }
    for subject in ROOMS:
        names = _outside(subject, native)
        found[f"files that name {subject} outside its rooms"] = Number(len(names), lambda names=names: " ".join(names))
    for name, text in native.items():
        is_contract = name.endswith(".h") and not name.endswith(tidy_graph.TEMPLATE)
        if is_contract and (count := tidy_graph.declarations(text)) > DECLARATIONS_MAX:
            found[f"declarations of {name}"] = Number(count)
    return found


def _step(value: int, step: int) -> int:
    return -(-value // step) * step


def _outside(subject: str, native: Mapping[str, str]) -> list[str]:
    """Files that name the subject though they are none of its rooms."""
    words, rooms = ROOMS[subject]
    found = []
    for name, text in native.items():
        if not name.startswith(SUBJECT_FOLDERS.get(subject, "")) or re.fullmatch(rooms, name):
            continue
        matches = re.findall(rf"\w*(?:{words})\w*", tidy_graph.without_comments(text), re.IGNORECASE)
        if set(matches) - OTHER_WORDS:
            found.append(name)
    return found


def read_ceilings() -> dict[str, int]:
    """The ceilings by name."""
    ceilings: dict[str, int] = json.loads(FILE.read_text(encoding="utf-8"))
    return ceilings


def compare(measured: Mapping[str, Number], ceilings: Mapping[str, int]) -> list[str]:
    """One finding per number that is not at its ceiling; a header without a row has one of its own."""
    found = []
    for name, number in measured.items():
        ceiling = ceilings.get(name, DECLARATIONS_MAX if name.startswith("declarations of ") else 0)
        if number.value > ceiling:
            found.append(f"{name}: {number.value}, and the ceiling is {ceiling}\n{number.why()}".rstrip())
        elif number.value < ceiling:
            found.append(f"{name}: {number.value}, below the ceiling of {ceiling}: write {number.value}")
    found += [f"{name}: delete the row" for name in ceilings if name not in measured]
    return found


def main(words: list[str]) -> None:
    measured = numbers(tidy_graph.read_native(ROOT))
    if words == ["--write"]:
        old = read_ceilings()
        lowered = {name: min(number.value, old.get(name, 0)) for name, number in measured.items() if name in old}
        FILE.write_text(json.dumps(lowered, indent=2) + "\n", encoding="utf-8")
        return
    for name, number in measured.items():
        print(f"{name}: {number.value}", *number.why().splitlines(), sep="\n    ")


if __name__ == "__main__":
    main(sys.argv[1:])
