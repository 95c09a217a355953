"""Breaks the tree on purpose, one break at a time, and says which ones no test notices.

    python tests/breaks/run.py                all breaks of breaks.py
    python tests/breaks/run.py base-map-gap   some
    python tests/breaks/run.py --whole        their tests without a break, which must pass

It works on a copy of the tree in build/breaks, with the interpreter that runs this file. A break is noticed if its
tests fail, or do not come to an end. The exit code is 1 if a break slips through, no longer fits the sources, or does
not compile. With ccache a core is compiled in seconds.
"""

import argparse
import filecmp
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from breaks import BREAKS, Break

ROOT = Path(__file__).resolve().parent.parent.parent
COPY = ROOT / "build" / "breaks" / "tree"
CCACHE = Path("/usr/lib/ccache")
BUILD_LIMIT_S = 1800
TEST_LIMIT_S = 120
RUN_LIMIT_S = 600
LEFT_OUT = {".git", ".venv", "build", "dist", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}
BUILD_OF_TESTS = "import sys; sys.path.insert(0, 'tests/native'); import native_build; native_build.build()"
NOTICED, SLIPPED, UNFIT = "noticed", "SLIPS THROUGH", "UNFIT"


def files_of(folder: Path) -> set[Path]:
    """All files and links that belong to the tree, relative to it."""
    found: set[Path] = set()
    for place, folders, names in os.walk(folder):
        links = [name for name in folders if Path(place, name).is_symlink()]
        folders[:] = [name for name in folders if name not in LEFT_OUT and name not in links and name != "__pycache__"]
        kept = [name for name in names if not name.endswith((".so", ".pyc")) and name not in LEFT_OUT]
        found |= {Path(place, name).relative_to(folder) for name in (*kept, *links)}
    return found


def renew_copy() -> None:
    """Makes the copy equal to the tree; files that are equal already keep their times."""
    COPY.mkdir(parents=True, exist_ok=True)
    wanted = files_of(ROOT)
    for path in files_of(COPY) - wanted:
        (COPY / path).unlink()
    for path in wanted:
        source, target = ROOT / path, COPY / path
        if source.is_symlink():
            target.unlink(missing_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source.readlink())
        elif not target.exists() or not filecmp.cmp(source, target, shallow=False):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def environment() -> dict[str, str]:
    """Of everything that runs in the copy: its own horo comes first, and the compiler is ccache's."""
    path = os.pathsep.join([*([str(CCACHE)] if CCACHE.is_dir() else []), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(COPY)}


def build() -> str:
    """Compiles the copy's core, and that of its tests; what the compiler says if that fails, else nothing."""
    for words in (["setup.py", "-q", "build_ext", "--inplace", "--force"], ["-c", BUILD_OF_TESTS]):
        done = run([sys.executable, *words], BUILD_LIMIT_S)
        if done is None:
            return "it takes too long"
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if "error:" in line]
            return "\n".join(errors or [done.stderr[-800:]])
    return ""


def run(words: list[str], limit_s: float) -> subprocess.CompletedProcess[str] | None:
    """None if it takes too long; it and all that it has started are gone then."""
    process = subprocess.Popen(
        words,
        cwd=COPY,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return None
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def test(broken: Break) -> tuple[str, str]:
    """The verdict of the break's tests, and their last words."""
    words = [
        "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--timeout={TEST_LIMIT_S}", *shlex.split(broken.tests),
    ]  # fmt: skip
    done = run([sys.executable, *words], RUN_LIMIT_S)
    if done is None:
        return NOTICED, f"the tests did not end within {RUN_LIMIT_S} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E   "))]
    last = done.stdout.strip().splitlines()[-1:]
    if done.returncode == 0:
        return (SLIPPED, last[0]) if " passed" in last[0] else (UNFIT, f"no test ran: {last[0]}")
    if done.returncode == 1 or done.returncode < 0:
        return NOTICED, "; ".join([*lines[:1], *last]) or f"pytest ended with {done.returncode}"
    return UNFIT, f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-800:]}"


def try_out(broken: Break) -> tuple[str, str]:
    """Applies a break to the copy, looks at its tests, and takes it back."""
    path = COPY / broken.file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if (count := text.count(broken.old)) != 1:
        return UNFIT, f"{broken.file} has the old text {count} times; write it anew in tests/breaks/breaks.py"
    path.write_text(text.replace(broken.old, broken.new), encoding="utf-8")
    try:
        if broken.is_native and (words := build()):
            return UNFIT, f"it does not compile: {words}"
        return test(broken)
    finally:
        path.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Breaks the tree on purpose, one break at a time.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of breaks (default: all)")
    parser.add_argument("--whole", action="store_true", help="run the tests of the breaks without any")
    chosen = parser.parse_args()
    known = {broken.name: broken for broken in BREAKS}
    if unknown := [name for name in chosen.names if name not in known]:
        parser.error(f"{', '.join(unknown)}: no such break; there are {', '.join(known)}")
    names = sorted(chosen.names or known, key=lambda name: known[name].is_native)  # those leave a broken core behind
    renew_copy()
    if (chosen.whole or not known[names[0]].is_native) and (words := build()):
        sys.exit(f"the copy does not compile:\n{words}")
    bad = []
    for name in names:
        begin = time.monotonic()
        verdict, words = test(known[name]) if chosen.whole else try_out(known[name])
        if chosen.whole:
            verdict = {NOTICED: "FAILS WITHOUT IT", SLIPPED: "passes"}.get(verdict, verdict)
        print(f"{verdict:<14} {name} ({time.monotonic() - begin:.0f} s): {known[name].shows}\n    {words}", flush=True)
        bad += [name] if verdict not in {NOTICED, "passes"} else []
    print(f"{len(names)} breaks, {len(bad)} to look at{': ' if bad else ''}{', '.join(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
