"""Makes docs/performance.md and its pictures from the results of `make bench`.

python benchmarks/plot.py                                  build/bench -> docs/performance.md
python benchmarks/plot.py --results DIR --page FILE.md     pictures go beside the page, into a folder of its name
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chapters
import suite
from measured import BadResults, Document, read_folder
from report import ROOT

INTRODUCTION = """\
# Performance

This page compares horo with its peers. `make performance` writes it from the results of `make bench`: no number here is
typed by hand. [Benchmarks]({benchmarks}) explains how a contest works, the
[performance notes]({notes}) where the time goes.

In tables with sizes, a time is that of one call on the slowest rank, as the median of the rounds; the size is that of
the largest tensor on one rank. The last column is the time of the fastest peer over that of horo, as the median of the
ratios within heats. Bands in pictures are from the fastest to the slowest round. The cores of the ranks share a cache,
unless a title has "separate caches" or "all rounds".
"""


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Makes the page about performance from results.")
    parser.add_argument("--results", type=Path, default=suite.RESULTS, metavar="DIR", help="default: build/bench")
    page = ROOT / "docs" / "performance.md"
    parser.add_argument("--page", type=Path, default=page, metavar="FILE", help="default: docs/performance.md")
    return parser.parse_args(words)


def machine_lines(documents: Sequence[Document]) -> list[str]:
    """Where, when, and what; one entry for each different answer."""

    def said(of: Callable[[dict[str, Any]], str]) -> str:
        return "; ".join(dict.fromkeys(filter(None, (of(document.content) for document in documents))))

    def machine_text(content: dict[str, Any]) -> str:
        machine = content["machine"]
        cores = f"{machine['cores']} cores of {machine['cpu']} ({machine['simd']})"
        return f"{cores}, {machine['memory']}, {machine['system']}"

    contestants = {}
    for document in documents:
        for name, versions in document.content.get("contestants", {}).items():
            contestants[name] = ", ".join(map(" ".join, versions.items())).removeprefix("mpi ")
    by_versions: dict[str, list[str]] = {}
    for name, versions in contestants.items():
        by_versions.setdefault(versions, []).append(name)
    knobs = said(lambda content: ", ".join(f"{name}={value}" for name, value in content["knobs"].items()))
    return [
        "## Where",
        "",
        f"* machine: {said(machine_text)}",
        f"* time: {min(d.content['time'] for d in documents)} to {max(d.content['time'] for d in documents)}",
        f"* commit: {said(lambda content: content['commit'])}",
        *[f"* {'; '.join(names)}: {versions}" for versions, names in by_versions.items()],
        f"* variables that were set: {knobs or 'none'}",
        "",
    ]


def in_order(documents: Sequence[Document]) -> list[Document]:
    """As the suite runs them; what it does not know comes last."""
    order = [benchmark.name for benchmark in suite.BENCHMARKS]
    return sorted(documents, key=lambda d: (order.index(d.name) if d.name in order else len(order), d.name))


def write_page(documents: Sequence[Document], page: Path) -> None:
    pictures = page.parent / page.stem
    for old in pictures.glob("*.svg"):
        old.unlink()
    made = [chapters.make(document, pictures) for document in in_order(documents)]
    links = {
        "benchmarks": ROOT / "benchmarks" / "README.md",
        "notes": ROOT / "docs" / "explanation" / "performance-notes.md",
    }
    relative = {name: os.path.relpath(target, page.parent) for name, target in links.items()}
    lines = [INTRODUCTION.format(**relative), *machine_lines(documents)]
    ahead = [line for chapter in made for line in chapter.ahead]
    lines += ["## Where a peer is ahead", ""]
    if ahead:
        lines += ["A range of sizes is followed by how many times as fast the named peer is.", "", *ahead]
    else:
        lines.append("Nowhere in these results.")
    lines.append("")
    for chapter in made:
        lines += [*chapter.lines, ""]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    try:
        write_page(read_folder(arguments.results), arguments.page)
    except BadResults as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.page} and {arguments.page.parent / arguments.page.stem}/ are new")
    return 0


if __name__ == "__main__":
    sys.exit(main())
