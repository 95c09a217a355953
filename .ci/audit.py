"""``audit.py PIP_AUDIT LOCK...``: known vulnerabilities of the packages in lock files, as ``make audit``.

Exit code 0: all packages were looked up, none is known to be vulnerable. 1: some are. 2: not all could be looked up,
mostly since the database cannot be reached from here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

__all__: list[str] = []

_LIMIT_S = 300


def _audit(program: str, lock: str) -> tuple[int, list[str], list[str]]:
    """The number of packages in ``lock``, a line for each vulnerability, and a line for each that was not looked up."""
    command = [program, "--format=json", "--progress-spinner=off", "--require-hashes", "--disable-pip", "-r", lock]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        said = done.stderr.strip().splitlines() or [f"{program} ended with {done.returncode}"]
        return 1, [], [said[-1]]
    found = [
        f"{package['name']} {package['version']}: {known['id']}, fixed in {known['fix_versions'] or 'no version yet'}"
        for package in packages
        for known in package.get("vulns", [])
    ]
    return len(packages), found, [package["skip_reason"] for package in packages if "skip_reason" in package]


def _main(arguments: Sequence[str]) -> int:
    program, *locks = arguments
    code = 0
    for lock in locks:
        count, found, skipped = _audit(program, lock)
        for line in found:
            print(f"audit: {lock}: {line}")
        if skipped:
            print(
                f"audit: {lock}: {len(skipped)} of {count} packages could not be looked up, so nothing is known about "
                f"them; is the database of vulnerabilities reachable from here? The last reason: {skipped[-1]}"
            )
        else:
            print(f"audit: {lock}: {count} packages looked up")
        code = max(code, 1 if found else 0, 2 if skipped else 0)
    return code


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
