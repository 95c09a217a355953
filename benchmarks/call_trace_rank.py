"""What call_trace.py lets the interpreter of a tree do: compile its core with hooks, and trace one path of it.

    TREE/.venv/bin/python benchmarks/call_trace_rank.py TREE                     prints the library's path
    TREE/.venv/bin/python benchmarks/call_trace_rank.py TREE LIBRARY PATH CALLS  prints addresses in the library

The addresses are those of the functions that rank 0 entered, in order, as a JSON list.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

TREE = Path(sys.argv[1])
FOLDER = TREE / "build" / "trace"
CAPACITY = 1 << 20
WARM_CALLS = 20

DECLARATIONS = """
void trace_begin(void **entered, size_t capacity);
size_t trace_end(void);
void *trace_base(void);
"""
# Of the thread that has called trace_begin alone: what the thread of the core does is no part of the call.
HOOKS = """
#include <dlfcn.h>
#define BARE __attribute__((no_instrument_function))
static __thread void **trace_entered;
static __thread size_t trace_capacity, trace_count;
BARE void __cyg_profile_func_enter(void *function, void *caller);
BARE void __cyg_profile_func_exit(void *function, void *caller);
BARE void __cyg_profile_func_enter(void *function, void *caller) {
    (void)caller;
    if (trace_count < trace_capacity) {
        trace_entered[trace_count++] = function;
    }
}
BARE void __cyg_profile_func_exit(void *function, void *caller) { (void)function; (void)caller; }
BARE static void trace_begin(void **entered, size_t capacity) {
    trace_entered = entered; trace_count = 0; trace_capacity = capacity;
}
BARE static size_t trace_end(void) { trace_capacity = 0; return trace_count; }
BARE static void *trace_base(void) {
    Dl_info info;
    return dladdr((void *)trace_base, &info) != 0 ? info.dli_fbase : NULL;
}
"""


def build() -> Path:
    """The module with the hooks, compiled if a source has changed."""
    from cffi import FFI  # noqa: PLC0415
    from setuptools import Distribution  # noqa: PLC0415

    sys.path.insert(0, str(TREE / "native"))  # its build.py and parallel.py
    native_build, parallel = map(importlib.import_module, ("build", "parallel"))

    digest = hashlib.sha256(HOOKS.encode())
    for path in sorted(path for path in (TREE / "native").rglob("*") if path.suffix in {".c", ".h", ".py", ".ptx"}):
        digest.update(path.read_bytes())
    library, stamp = FOLDER / "_native.abi3.so", FOLDER / "stamp"
    if library.exists() and stamp.exists() and stamp.read_text() == digest.hexdigest():
        return library
    FOLDER.mkdir(parents=True, exist_ok=True)
    ffi = FFI()
    ffi.cdef("\n".join(native_build.declarations(h.read_text(encoding="utf-8")) for h in native_build.HEADERS))
    ffi.cdef(DECLARATIONS)
    ffi.set_source(
        "_native",
        "\n".join([*(f'#include "{header.name}"' for header in native_build.HEADERS), HOOKS]),
        sources=[str(TREE / source) for source in native_build.sources()],
        include_dirs=[str(TREE / "native/include"), str(TREE / "native/src")],
        extra_compile_args=[*native_build.COMPILE_FLAGS, "-O0", "-g1", "-finstrument-functions"],
        extra_link_args=native_build.LINK_FLAGS,
        py_limited_api=True,
    )
    extension = ffi.distutils_extension(str(FOLDER), verbose=False)
    builder = parallel.ParallelBuild(Distribution({"ext_modules": [extension]}))
    builder.build_temp = builder.build_lib = str(FOLDER)
    builder.editable_mode = True  # keeps symbols for a debugger
    builder.force = True
    builder.ensure_finalized()
    builder.run()
    stamp.write_text(digest.hexdigest())
    return library


def load(library: Path) -> Any:
    """The module, which stands in for the tree's core from now on."""
    spec = importlib.util.spec_from_file_location("_native", library)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {library}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["horo._native"] = module
    return module


def trace(native: Any, path: str, calls: int) -> list[int]:
    """The shortest of so many calls on one path.

    Calls of ranks that wait at once are counted on one host and carried between hosts. A rank that does not say that it
    waits announces its call, so that the leader makes the record.
    """
    sys.path[:0] = [str(TREE / "tests"), str(TREE)]
    import forks  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415
    from fabric import close_setup, make_setups  # noqa: PLC0415  (tests/fabric.py of the tree)

    core = forks.core_of(TREE)
    hosts = [1, 1] if path == "carried" else [2]
    setups = make_setups(hosts, tcp=True, segment_bytes=forks.segment_bytes(hosts), spin_us=1000)
    rank = forks.fork_ranks(setups, close_setup)
    context = core.Context(setups[rank])
    data = np.ones(1, np.float32)
    tensor = core.Tensor(data.ctypes.data, data.ctypes.data, data.shape, core.DTYPES["float32"])
    is_sync = path != "leader" or rank == 0
    call = core.RequestBuffer.of(
        core.OPS["allreduce"], "data", [tensor], reduce_op=core.REDUCE_OPS["max"], sync=is_sync
    )
    entered = native.ffi.new("void *[]", CAPACITY)
    shortest: list[int] = []
    for index in range(WARM_CALLS + calls):
        native.lib.trace_begin(entered, CAPACITY)
        context.run(call)
        count = native.lib.trace_end()
        if index >= WARM_CALLS and count < CAPACITY and (not shortest or count < len(shortest)):
            base = int(native.ffi.cast("uintptr_t", native.lib.trace_base()))
            shortest = [int(native.ffi.cast("uintptr_t", entered[i])) - base for i in range(count)]
    context.destroy()
    forks.end_ranks(rank, len(setups))
    return shortest


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(build())
    else:
        print(json.dumps(trace(load(Path(sys.argv[2])), sys.argv[3], int(sys.argv[4]))))
