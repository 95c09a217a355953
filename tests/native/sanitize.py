"""Runs pytest on the core built under a sanitizer: `sanitize.py address|thread [pytest arguments]`.

`address` also finds undefined behaviour.

The interpreter is not instrumented, so the sanitizer's library must be loaded before it (LD_PRELOAD); what happens
inside the core and in everything that the sanitizer intercepts (malloc, memcpy, pthread) is checked all the same.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SANITIZERS = {"address": "libasan.so", "thread": "libtsan.so"}
OPTIONS = {
    # No leak check: the interpreter keeps thousands of blocks on purpose, and as it is built without frame pointers, no
    # suppression can tell their stacks from the core's. The fuzz replay, a plain C program, does check for leaks.
    "ASAN_OPTIONS": "detect_leaks=0:strict_string_checks=1:detect_stack_use_after_return=1:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # intercept_tls_get_addr: for thread-local variables of loaded modules the sanitizer guesses at a header in front of
    # them. That is thought to be why it now and then "failed to allocate" 500 TB: the size was a pointer into its heap.
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:history_size=4:intercept_tls_get_addr=0:"
    f"suppressions='{FOLDER / 'thread.supp'}'",
}
# Threads of a rank, ranks that share memory, and what they have in common: the engine, its lanes and the log.
_RACES = """
cores device_staged end engine join link log lone nccl nccl_failures ordered pairs parts stalls stress
teams timeline waits
"""
# What else reads and writes memory, in one thread or as the random schedules do.
_MEMORY = """
calls gather kernel refusal transport transport_own values wire
"""
FILES = {"thread": _RACES.split(), "address": [*_RACES.split(), *_MEMORY.split()]}
"""The files of a sanitizer's run; `HORO_ALL_CASES=1`, as of `make test-all`, takes all."""
LEFT_OUT = {
    # Processes of their own, whose core is the installed one.
    "end": ["a_death_after_the_leader_in_between"],
    "pairs": ["a_rank_that_is_killed_when", "a_rank_that_leaves_tells_the_sender", "its_leader_passes_that_on"],
    "parts": ["ranks_share_memory_in_larger_pages"],
    "stalls": ["a_rank_that_is_stopped"],
    "teams": ["a_forked_child_does_not_keep"],
    "waits": ["ctrl_c_ends", "a_peer_does_not_wait_for_the_interpreter"],
    # Thousands of the same.
    "gather": ["a_group_may_have_thousands"],
    "link": ["a_leader_that_reads_nothing"],
    "lone": ["places_in_the_log_are_told_apart"],
    "nccl": ["a_batch_of_many_calls", "what_is_pending_on_a_gpu"],
    "timeline": ["more_than_the_ring_holds"],
}
"""Tests of these files that show a sanitizer nothing that the others there do not; by how their names begin."""
ADDR_NO_RANDOMIZE = 0x0040000


def _library(sanitizer: str) -> str:
    """Where the compiler that builds the core keeps the library."""
    compiler = os.environ.get("CC", "cc").split()[0]
    found = subprocess.run(
        [compiler, f"-print-file-name={SANITIZERS[sanitizer]}"], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()
    if not Path(found).is_absolute():
        raise FileNotFoundError(
            f"{compiler} has no {SANITIZERS[sanitizer]}: install the compiler's sanitizer libraries"
        )
    return str(Path(found).resolve())


def environment(sanitizer: str, base: Mapping[str, str]) -> dict[str, str]:
    """`base` for an interpreter that is to load the core built under `sanitizer`; its own options win.

    FileNotFoundError: the compiler has no such library.
    """
    preload = ":".join(filter(None, [_library(sanitizer), base.get("LD_PRELOAD")]))
    result = {**OPTIONS, **base, "HORO_SANITIZE": sanitizer, "LD_PRELOAD": preload}
    result["PYTHONMALLOC"] = "malloc"  # one block per object, so that an overrun out of a Python buffer is seen
    return result


def selection(sanitizer: str, arguments: Sequence[str]) -> list[str]:
    """The arguments for pytest: the user's, with the files that a sanitizer is for if none of them is a path."""
    if any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        return list(arguments)
    if os.environ.get("HORO_ALL_CASES") == "1":
        return [str(FOLDER), *arguments]
    files = [str(FOLDER / f"test_{name}.py") for name in FILES[sanitizer]]
    left_out = [f"tests/native/test_{name}.py::test_{test}" for name, tests in LEFT_OUT.items() for test in tests]
    return [*files, *(f"--deselect={each}" for each in left_out), *arguments]


def main(arguments: list[str]) -> None:
    """Becomes pytest; returns only by raising SystemExit."""
    if not arguments or arguments[0] not in SANITIZERS:
        given = repr(arguments[0]) if arguments else "nothing"
        raise SystemExit(f"sanitize.py: the first argument must be one of {', '.join(SANITIZERS)}, got {given}")
    sanitizer, *rest = arguments
    try:
        env = environment(sanitizer, os.environ)
    except (FileNotFoundError, subprocess.SubprocessError) as error:
        raise SystemExit(f"sanitize.py: {error}") from error
    # Before the library is loaded: the compiler is not what is to be checked.
    build = [sys.executable, "-c", "import native_build; native_build.build()"]
    if subprocess.run(build, cwd=FOLDER, env={**os.environ, "HORO_SANITIZE": sanitizer}, check=False).returncode != 0:
        raise SystemExit(f"sanitize.py: the core does not build with the {sanitizer} sanitizer, see above")
    if sanitizer == "thread":
        # Its shadow memory has fixed places, which a kernel with many random bits of mmap may have taken.
        ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)
    # --capture=sys leaves descriptor 2 alone: the report of a run that ends on the spot must not end in a buffer.
    pytest = [sys.executable, "-m", "pytest", "--capture=sys", *selection(sanitizer, rest)]
    os.execve(sys.executable, pytest, env)


if __name__ == "__main__":
    main(sys.argv[1:])
