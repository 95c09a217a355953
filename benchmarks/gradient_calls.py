"""What a gradient costs in Python: calls, and CPU time, of its hook and of the end of backward. Trees of horo, in turn.

    python benchmarks/gradient_calls.py
    python benchmarks/gradient_calls.py ../before .

Two ranks of one host train nothing but gradients, with HORO_OVERLAP=always (hooks submit) and never (the end of
backward does). Calls are those of Python functions and of C functions that sys.setprofile shows, so they are the same
on any machine; attributes and the core's own functions are none. CPU is that of the calling thread, less a backward
without horo; that of the end has the exchange in it, where the thread does that itself. Per gradient, of rank 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from trees import check_built

SCRIPT = Path(__file__).resolve().parent / "gradient_calls_rank.py"
LIMIT_S = 300
SETS = {"resnet50": "161 of ResNet-50", "161": "161 of 1 KiB", "1000": "1000 of 1 KiB"}
FORM = "{:<18} {:<8} {:<6} {:>8} {:>6} {:>8}"


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Calls and CPU time of a gradient, in its hook and at the end.")
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("trees", type=Path, nargs="*", default=[root], help="after `make build` (default: this)")
    parser.add_argument("--steps", type=int, default=30, help="the median of which is shown (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the result here too")
    chosen = parser.parse_args(words)
    check_built(parser, *chosen.trees)
    return chosen


def measure(tree: Path, chosen: str, overlap: str, steps: int) -> dict[str, Any]:
    folder = tree.resolve() / ".venv/bin"
    command = [str(folder / "hororun"), "-np", "2", "-x", f"HORO_OVERLAP={overlap}", "--no-prefix", "--output", "rank0"]
    command += [str(folder / "python"), str(SCRIPT), chosen, str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=tree)
    if done.returncode != 0:
        raise SystemExit(f"{SCRIPT.name}: {tree} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def main(words: list[str]) -> None:
    chosen = parse_arguments(words)
    rows = []
    for tree in chosen.trees:
        print(FORM.format(tree.resolve().name, "overlap", "", "Python", "C", "CPU us"))
        for name, title in SETS.items():
            for overlap in ("always", "never"):
                found = measure(tree, name, overlap, chosen.steps)
                for part in ("hook", "end"):
                    figures = found[part]
                    print(FORM.format(title, overlap, part, *(f"{value:.1f}" for value in figures)), flush=True)
                rows.append({"tree": tree.resolve().name, "gradients": name, "overlap": overlap, **found})
    if chosen.json:
        chosen.json.write_text(json.dumps({"benchmark": "gradient_calls", "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
