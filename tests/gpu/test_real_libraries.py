"""The libraries that horo finds are those that torch uses."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import horo.torch as hvd


def test_the_driver_is_found() -> None:
    assert hvd.cuda_built()


def test_nccl_is_that_of_torch() -> None:
    if not torch.distributed.is_nccl_available():
        pytest.skip(f"torch {torch.__version__} has no NCCL; `pytest tests/gpu` with a torch that has one runs this")
    major, minor, patch = torch.cuda.nccl.version()[:3]
    assert hvd.nccl_built() == major * 10000 + minor * 100 + patch


def test_check_build_counts_the_devices() -> None:
    words = [sys.executable, "-m", "horo.runner", "--check-build"]
    shown = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300).stdout
    assert f", {torch.cuda.device_count()} devices" in shown
