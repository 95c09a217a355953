"""Looked at before anything else of ``horo.torch``: is there a torch that horo can work with?"""

from __future__ import annotations

import re

__all__ = ["TORCH_VERSION_MIN", "check_version"]

TORCH_VERSION_MIN = (2, 1)


def check_version(version: str) -> None:
    """Raises ImportError for a version such as ``"2.0.1+cpu"`` that is too old."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < TORCH_VERSION_MIN:
        wanted = ".".join(map(str, TORCH_VERSION_MIN))
        raise ImportError(f"horo.torch needs torch {wanted} or newer; {version} is installed: pip install -U torch")


try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise  # torch is there, and something that it needs is not
    raise ImportError("horo.torch needs torch, which is not installed: pip install torch") from error

check_version(torch.__version__)
