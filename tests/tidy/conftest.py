"""The option by which ``make wheel`` has its own archive and wheel looked over, so that none is built once more."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--built", type=Path, help="a folder with the source archive and the wheel to look over")
