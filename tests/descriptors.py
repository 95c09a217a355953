"""The descriptors of this process, to see whether a test leaves any open."""

import gc
from contextlib import suppress
from pathlib import Path


def open_descriptors() -> set[tuple[str, str]]:
    """The number of each open descriptor and what it refers to; what only garbage holds is closed first.

    Nothing is left open where ``open_descriptors() <= before``: threads of earlier tests may have closed more.
    """
    gc.collect()
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that the folder was read with
            found.add((entry.name, str(entry.readlink())))
    return found
