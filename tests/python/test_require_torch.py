"""horo.torch without a usable torch is one sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from horo.torch.compat.torch_version import check_version


def import_with(preparation: str) -> str:
    """Last line of stderr of ``import horo.torch`` after some lines of Python."""
    code = f"import sys, types\n{preparation}\nimport horo.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_missing_torch_is_named() -> None:
    line = import_with("sys.modules['torch'] = None")
    assert line == "ImportError: horo.torch needs torch, which is not installed: pip install torch"


def test_old_torch_is_named() -> None:
    line = import_with("sys.modules['torch'] = types.SimpleNamespace(__version__='1.13.1+cu117')")
    assert line == "ImportError: horo.torch needs torch 2.1 or newer; 1.13.1+cu117 is installed: pip install -U torch"


@pytest.mark.parametrize("version", ["2.1.0", "2.13.0+cpu", "2.1.0a0+git123", "3.0"])
def test_new_enough_versions_pass(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["2.0.1", "1.13.1+cu117", "0.4"])
def test_old_versions_are_refused(version: str) -> None:
    with pytest.raises(ImportError, match="or newer"):
        check_version(version)
