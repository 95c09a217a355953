"""The recipe of a container in the guide to clusters: its sections, and what of it can run without a container."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from document_blocks import ROOT, blocks_of
from example_runs import start

PAGE = ROOT / "docs" / "how-to" / "hpc.md"


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    (recipe,) = (block.code for block in blocks_of(PAGE) if block.code.startswith("Bootstrap: "))
    parts = re.split(r"^%(\w+)\n", recipe, flags=re.MULTILINE)
    assert re.fullmatch(r"Bootstrap: docker\nFrom: python:3\.\d+-slim-bookworm\n\n", parts[0])
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_checkout_is_copied_and_installed(sections: dict[str, str]) -> None:
    assert set(sections) == {"files", "post", "test"}
    source, target = sections["files"].split()
    assert source == "."
    installed = [line.split() for line in sections["post"].splitlines() if "pip install" in line]
    assert [words[-2:] for words in installed] == [["torch", target]]


@pytest.mark.parametrize("name", ["post", "test"])
def test_commands_are_correct(sections: dict[str, str], name: str) -> None:
    done = subprocess.run(["sh", "-n"], input=sections[name], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_packages_are_those_that_the_build_and_slurm_need(sections: dict[str, str]) -> None:
    (line,) = (line for line in sections["post"].splitlines() if "apt-get install" in line)
    packages = {word for word in line.partition(" install ")[2].split() if not word.startswith("-")}
    assert packages == {"gcc", "libc6-dev", "munge"}
    needed = (ROOT / ".ci" / "venv").read_text()
    assert "apt-get install gcc libc6-dev" in needed


def test_what_the_image_runs_last_succeeds(sections: dict[str, str]) -> None:
    hororun = Path(sys.executable).parent / "hororun"
    command = sections["test"].strip().replace("hororun", str(hororun), 1)
    assert "[X] PyTorch" in start(["sh", "-c", command]).stdout
