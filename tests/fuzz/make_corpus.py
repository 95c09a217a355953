"""Writes the generated part of the corpus: `python tests/fuzz/make_corpus.py`.

One file per sample message (valid-*), and mutants of each (mutant-*): cut, with a byte changed, with a length or count
enlarged. What libFuzzer has found is kept beside them as found-* and is left alone.
"""

import random
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "corpus" / "wire"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "native"))
import wire_oracle  # noqa: E402


def _mutants(data: bytes, rng: random.Random) -> list[bytes]:
    """A cut one, one with a changed byte, one with a stretch of 0xff where lengths and counts are."""
    cut = data[: rng.randrange(len(data))]
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    enlarged = bytearray(data)
    start = rng.randrange(1, len(data))
    enlarged[start : start + 4] = b"\xff" * len(enlarged[start : start + 4])
    return [cut, bytes(changed), bytes(enlarged)]


def corpus() -> dict[str, bytes]:
    """File name -> content; the same every time."""
    rng = random.Random(1)
    result = {"mutant-empty": b""}
    for name, data in wire_oracle.samples().items():
        result[f"valid-{name}"] = data
        for kind, mutant in zip(("cut", "changed", "enlarged"), _mutants(data, rng), strict=True):
            result[f"mutant-{name}-{kind}"] = mutant
    return result


def main() -> None:
    """Replaces the generated files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in [*FOLDER.glob("valid-*"), *FOLDER.glob("mutant-*")]:
        path.unlink()
    for name, data in corpus().items():
        (FOLDER / name).write_bytes(data)


if __name__ == "__main__":
    main()
