"""The text of the kernels for GPUs is that of their source, and drivers can take it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "native"))
from make_ptx import PTX, assemble, digest, find_nvrtc, find_ptxas, make_ptx  # native/make_ptx.py

TEXT = PTX.read_text(encoding="ascii")


def test_the_text_was_made_of_the_sources_as_they_are() -> None:
    assert f"// {digest()}\n" in TEXT, "run native/make_ptx.py"


def test_it_is_for_the_oldest_driver_and_rounds_each_operation() -> None:
    (version,) = re.findall(r"^\.version (\d+)\.(\d+)$", TEXT, re.MULTILINE)
    assert tuple(map(int, version)) <= (7, 4), "what a driver of CUDA 11.4 reads"
    assert re.findall(r"\.visible \.entry (\w+)\(", TEXT) == [
        "hr_pack",
        "hr_unpack",
        "hr_adasum_multiply",
        "hr_adasum_fold",
        "hr_adasum_total",
        "hr_adasum_combine",
    ]
    assert not re.findall(r"\bfma|\bmad\.\w*\.f|\.ftz|\.approx|\.extern|\.shared|\.local", TEXT)
    assert "\0" not in TEXT


def test_the_compiler_makes_the_same_text() -> None:
    library = find_nvrtc()
    if library is None:
        pytest.skip("NVRTC 11.8 is not there (`pip install nvidia-cuda-nvrtc-cu11==11.8.89`)")
    assert make_ptx(library) == TEXT


@pytest.mark.parametrize("target", ["sm_52", "sm_70", "sm_80", "sm_90"])
def test_the_assembler_takes_it(target: str) -> None:
    ptxas = find_ptxas()
    if ptxas is None:
        pytest.skip("ptxas is not there (`pip install nvidia-cuda-nvcc-cu11==11.8.89`)")
    assert assemble(ptxas, TEXT, target) == ""
