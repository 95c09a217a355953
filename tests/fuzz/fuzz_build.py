"""Builds the fuzz targets: `python tests/fuzz/fuzz_build.py replay|libfuzzer OUTPUT`.

`replay` needs the compiler that builds the core, with its sanitizers; `libfuzzer` needs clang.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FUZZ = ROOT / "tests" / "fuzz"
SHIM = ROOT / "tests" / "native" / "shim"
SOURCES = [
    FUZZ / "fuzz_wire.c", SHIM / "wire_walk.c", ROOT / "native/src/wire/decode.c", ROOT / "native/src/wire/encode.c",
    ROOT / "native/src/base/traits.c", ROOT / "native/src/base/buffer.c", ROOT / "native/src/base/pool.c",
    ROOT / "native/src/base/status.c",
]  # fmt: skip
FLAGS = [
    "-std=gnu11", "-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror",
]  # fmt: skip
INCLUDES = [f"-I{ROOT / 'native/include'}", f"-I{ROOT / 'native/src'}", f"-I{SHIM}"]


def build(kind: str, output: Path) -> None:
    """Compiles and links one program.

    Args:
        kind: "replay" (a program that takes files) or "libfuzzer".
        output: Where the program goes.

    Raises:
        subprocess.CalledProcessError: The compiler failed; it has printed why.
    """
    if kind == "replay":
        compiler, sanitize, sources = (
            os.environ.get("CC", "cc").split(),
            "address,undefined",
            [*SOURCES, FUZZ / "replay.c"],
        )
    else:
        compiler, sanitize, sources = ["clang"], "fuzzer,address,undefined", SOURCES
    command = [*compiler, *FLAGS, *INCLUDES, f"-fsanitize={sanitize}", *map(str, sources), "-o", str(output)]
    subprocess.run(command, check=True, timeout=120)


def main(arguments: list[str]) -> None:
    """The command line."""
    if len(arguments) != 2 or arguments[0] not in {"replay", "libfuzzer"}:
        raise SystemExit("usage: fuzz_build.py replay|libfuzzer OUTPUT")
    build(arguments[0], Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
