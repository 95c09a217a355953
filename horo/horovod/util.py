"""The names that scripts import from ``horovod.common.util``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from horo.config.table import drop_variables, environment, set_variables
from horo.torch.horovod_names.info import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    mpi_built,
    nccl_built,
    rocm_built,
)
from horo.torch.mpi_ops import handle_average_backwards_compatibility

__all__ = [
    "ccl_built",
    "check_extension",
    "check_num_rank_power_of_2",
    "cuda_built",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


check_num_rank_power_of_2 = num_rank_is_power_2


def check_extension(*_arguments: Any, **_named: Any) -> None:
    """Does nothing: Horovod looks here for its extension for a framework, and horo needs none."""


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether this is a framework that horo is for: ``"torch"``."""
    return ext_base_name == "torch"


def gpu_available(framework: str = "pytorch", verbose: bool = False) -> bool:
    """Whether this process sees a GPU."""
    return torch.cuda.is_available()


def get_average_backwards_compatibility_fun(_reduce_ops: Any) -> Callable[..., int]:
    """The function that makes an ``op`` of a deprecated ``average``."""
    return handle_average_backwards_compatibility


def is_iterable(x: Any) -> bool:
    """Whether ``iter(x)`` works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def split_list(values: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """Cuts a list into parts whose lengths differ by one at most, the longer ones first."""
    size, longer = divmod(len(values), parts)
    begins = [part * size + min(part, longer) for part in range(parts + 1)]
    return [values[begin:end] for begin, end in itertools.pairwise(begins)]


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Sets variables of the environment, and removes those that are None, until its end."""
    before = {name: environment().get(name) for name in variables}
    _apply(variables)
    try:
        yield
    finally:
        _apply(before)


def _apply(variables: Mapping[str, str | None]) -> None:
    drop_variables([name for name, value in variables.items() if value is None])
    set_variables({name: value for name, value in variables.items() if value is not None})
