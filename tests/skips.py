"""What makes skipped tests run: a reason to skip names the command, like `make test-mpi`, in backticks."""

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest

ALL_CASES = os.environ.get("HORO_ALL_CASES") == "1"
whole = pytest.mark.skipif(not ALL_CASES, reason="`make test-all` runs it")
"""For what is dear, and shown in the main by other tests."""

_COMMAND = re.compile(r"`([^`]+)`")
_APT = "apt install "
_AS_ROOT = "as root, on a machine or in a container that may make network namespaces"
_NOT_HERE = "not on this machine, or not in this kind of run: the reasons are above"


def apt_install(programs: Mapping[str, str], path: str | None = None) -> str:
    """Which programs are missing in PATH, or ``path``, and the command that installs them; empty: all are there."""
    missing = [program for program in programs if shutil.which(program, path=path) is None]
    packages = sorted({programs[program] for program in missing})
    is_are = "is" if len(missing) == 1 else "are"
    return f"{', '.join(missing)} {is_are} not installed (`{_APT}{' '.join(packages)}`)" if missing else ""


def no_compiler(path: str | None = None) -> str:
    """Why no test can compile anything, and the command that changes it; empty: there is a compiler."""
    return apt_install({os.environ.get("CC", "cc").split()[0]: "gcc libc6-dev"}, path)


def ways_to_run(reasons: Iterable[str]) -> list[str]:
    """One line for each way to have skipped tests run, with their number; ``reasons`` has one for each test."""
    tests: Counter[str] = Counter()
    packages: set[str] = set()
    for reason in reasons:
        found = _COMMAND.search(reason.replace("--with-mpi", "`make test-mpi`"))  # pytest-mpi's own reason
        if found is not None and found[1].startswith(_APT):
            packages |= set(found[1].removeprefix(_APT).split())
            tests[_APT] += 1
        elif found is not None:
            tests[found[1]] += 1
        else:
            tests[_AS_ROOT if "root" in reason.split() else _NOT_HERE] += 1
    last = tests.pop(_NOT_HERE, 0)
    ways = [(count, _APT + " ".join(sorted(packages)) if way == _APT else way) for way, count in tests.most_common()]
    ways += [(last, _NOT_HERE)] if last else []
    return [f"{count:5} {'test: ' if count == 1 else 'tests:'} {way}" for count, way in ways]
