"""Where one 4-byte allreduce passes in the core: calls, functions, files, and changes from one file to another.

    python benchmarks/call_trace.py
    python benchmarks/call_trace.py ../before --path counted --list

Of rank 0, from the begin of `horo_run` to its end, waiting included, the call with the fewest function calls of many.
The core is compiled without optimization and with -finstrument-functions, in build/trace of the tree, which needs an
environment of its own (`make build`). Inline functions of headers count. Times mean nothing in such a build.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from trees import check_built, run_in

SCRIPT = Path(__file__).resolve().parent / "call_trace_rank.py"
LIMIT_S = 300
PATHS = {
    "counted": "one host, counted",
    "leader": "one host, by the leader",
    "carried": "two hosts, carried",
}
FORM = "{:<26} {:>7} {:>10} {:>7} {:>17}"


@dataclass(frozen=True)
class Trace:
    """The functions that one call entered, in order.

    Attributes:
        calls: (function, its file below native) each.
    """

    calls: tuple[tuple[str, str], ...]

    def figures(self) -> dict[str, int]:
        files = [file for _, file in self.calls]
        return {
            "calls": len(self.calls),
            "functions": len(set(self.calls)),
            "files": len(set(files)),
            "changes of file": sum(a != b for a, b in itertools.pairwise(files)),
        }

    def listing(self) -> list[str]:
        """A line per file, in the order in which they are first entered, with its functions and their calls."""
        counts: dict[str, Counter[str]] = {}
        for function, file in self.calls:
            counts.setdefault(file, Counter())[function] += 1
        return [
            f"  {file}: {', '.join(f'{name} x{n}' if n > 1 else name for name, n in functions.items())}"
            for file, functions in counts.items()
        ]


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Where one 4-byte allreduce passes in the core.")
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("tree", type=Path, nargs="?", default=root, help="a tree after `make build` (default: this)")
    parser.add_argument("--path", choices=PATHS, action="append", help="this one only; may be repeated")
    parser.add_argument("--calls", type=int, default=400, help="to choose the shortest of (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="list the files with their functions")
    parser.add_argument("--json", type=Path, help="write the result here too")
    chosen = parser.parse_args(words)
    chosen.tree = chosen.tree.resolve()
    check_built(parser, chosen.tree)
    return chosen


def names_of(library: Path, addresses: set[int], tree: Path) -> dict[int, tuple[str, str]]:
    """(function, file below native) of each address in the library that lies in the core."""
    wanted = sorted(addresses)
    done = subprocess.run(
        ["addr2line", "-f", "-e", str(library)],
        input="".join(f"{address:#x}\n" for address in wanted),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    lines = done.stdout.splitlines()
    folder = f"{tree / 'native'}/"
    found = {}
    for address, function, place in zip(wanted, lines[::2], lines[1::2], strict=True):
        file = place.rpartition(":")[0]
        if file.startswith(folder):
            found[address] = (function, file.removeprefix(folder).removeprefix("src/"))
    return found


def trace(tree: Path, library: Path, path: str, calls: int) -> Trace:
    """The shortest of so many calls on this path."""
    addresses = json.loads(run_in(tree, SCRIPT, str(library), path, str(calls), limit_s=LIMIT_S))
    names = names_of(library, set(addresses), tree)
    return Trace(tuple(names[address] for address in addresses if address in names))


def main(words: list[str]) -> None:
    chosen = parse_arguments(words)
    library = Path(run_in(chosen.tree, SCRIPT, limit_s=LIMIT_S).splitlines()[-1])
    print(FORM.format("4-byte allreduce", "calls", "functions", "files", "changes of file"))
    rows = []
    for path in chosen.path or PATHS:
        found = trace(chosen.tree, library, path, chosen.calls)
        print(FORM.format(PATHS[path], *found.figures().values()), flush=True)
        if chosen.list:
            print("\n".join(found.listing()))
        rows.append({"path": path, **found.figures(), "entered": [list(call) for call in found.calls]})
    if chosen.json:
        chosen.json.write_text(json.dumps({"benchmark": "call_trace", "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
