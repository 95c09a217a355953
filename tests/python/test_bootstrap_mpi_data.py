"""Whether MPI carries the data between hosts, by settings, thread level and hosts."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from horo.bootstrap.host.grouping import Grouping
from horo.bootstrap.mpi.data import carries_data, check_mpi
from horo.config.table import Config
from horo.errors import UsageError

ONE_HOST, TWO_HOSTS = Grouping((0, 0)), Grouping((0, 1))


def world(multiple: bool = True) -> Any:
    level = "MPI_THREAD_MULTIPLE" if multiple else "MPI_THREAD_FUNNELED"
    return SimpleNamespace(rank=0, library="Fake MPI 1.0", thread_level=level, threads_multiple=multiple)


@pytest.mark.parametrize(
    ("settings", "grouping", "carries"),
    [
        ({}, ONE_HOST, False),
        ({}, TWO_HOSTS, True),
        ({"transport": "mpi"}, TWO_HOSTS, True),
        ({"transport": "mpi"}, ONE_HOST, False),
        ({"transport": "tcp"}, TWO_HOSTS, False),
    ],
)
def test_what_mpi_carries(settings: dict[str, str], grouping: Grouping, carries: bool) -> None:
    config = Config(**settings)
    check_mpi(config, world())
    assert carries_data(config, world(), [True, True], grouping) == carries
    assert not carries_data(config, None, [False, False], grouping)


def test_one_rank_that_may_not_call_mpi_on_threads_keeps_all_on_tcp(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "horo")
    assert not carries_data(Config(), world(), [True, False], TWO_HOSTS)
    assert "by TCP, not by Fake MPI 1.0" in caplog.text
    caplog.clear()
    assert not carries_data(Config(), world(False), [False, False], ONE_HOST)
    assert not carries_data(Config(transport="tcp"), world(False), [False, False], TWO_HOSTS)
    assert caplog.text == ""


def test_what_cannot_be_is_told_with_the_way_out() -> None:
    config = Config(transport="mpi")
    told = "HORO_TRANSPORT=mpi, but"
    with pytest.raises(UsageError, match=f"{told} the ranks of this job did not start through MPI"):
        check_mpi(config, None)
    with pytest.raises(UsageError, match=f"{told} Fake MPI 1.0 runs with MPI_THREAD_FUNNELED.*'multiple'"):
        check_mpi(config, world(False))
