"""Fuzz corpus: every input that ever mattered is replayed under AddressSanitizer and UBSan, leaks included."""

import os
import subprocess
from pathlib import Path

import fuzz_build
import make_corpus
import pytest
from skips import no_compiler

ENVIRONMENT = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "LD_PRELOAD": ""}
needs_compiler = pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())
PROBE = """
#include <stdlib.h>
#include <stdint.h>
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    return data[size] == 1;
}
"""


def run(program: Path, files: list[Path]) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, files)]
    return subprocess.run(command, env=ENVIRONMENT, check=False, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := no_compiler():
        pytest.skip(reason)
    program = tmp_path_factory.mktemp("fuzz") / "replay"
    fuzz_build.build("replay", program)
    return program


def test_the_whole_corpus_replays_clean(replay: Path) -> None:
    files = sorted(make_corpus.FOLDER.iterdir())
    result = run(replay, files)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout == f"{len(files)} files\n"


def test_the_generated_corpus_is_the_one_that_the_script_writes() -> None:
    kept = {p.name: p.read_bytes() for p in make_corpus.FOLDER.iterdir() if not p.name.startswith("found-")}
    assert kept == make_corpus.corpus()


@needs_compiler
def test_the_replay_sees_a_read_past_the_end_of_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, program, data = tmp_path / "probe.c", tmp_path / "probe", tmp_path / "input"
    source.write_text(PROBE)
    data.write_bytes(b"abc")
    monkeypatch.setattr(fuzz_build, "SOURCES", [source])
    fuzz_build.build("replay", program)
    result = run(program, [data])
    assert result.returncode != 0
    assert "heap-buffer-overflow" in result.stderr
