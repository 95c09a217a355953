"""What MPI carries, by settings, thread level and hosts."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from horo._bootstrap.host.grouping import Grouping
from horo._bootstrap.mpi.data import MpiPlan, check_mpi, plan_mpi
from horo._config import Config
from horo.errors import UsageError

ONE_HOST, TWO_HOSTS = Grouping((0, 0)), Grouping((0, 1))


def world(multiple: bool = True) -> Any:
    level = "MPI_THREAD_MULTIPLE" if multiple else "MPI_THREAD_FUNNELED"
    return SimpleNamespace(rank=0, library="Fake MPI 1.0", thread_level=level, threads_multiple=multiple)


@pytest.mark.parametrize(
    ("settings", "grouping", "plan"),
    [
        ({}, ONE_HOST, MpiPlan()),
        ({}, TWO_HOSTS, MpiPlan(transport=True)),
        ({"transport": "mpi"}, TWO_HOSTS, MpiPlan(transport=True)),
        ({"transport": "mpi"}, ONE_HOST, MpiPlan()),
        ({"transport": "tcp"}, TWO_HOSTS, MpiPlan()),
        ({"cpu_operations": "mpi"}, ONE_HOST, MpiPlan(collectives=True)),
        ({"cpu_operations": "mpi"}, TWO_HOSTS, MpiPlan(transport=True, collectives=True)),
        ({"cpu_operations": "gloo", "transport": "tcp"}, TWO_HOSTS, MpiPlan()),
    ],
)
def test_what_mpi_carries(settings: dict[str, str], grouping: Grouping, plan: MpiPlan) -> None:
    config = Config(**settings)
    check_mpi(config, world())
    assert plan_mpi(config, world(), [True, True], grouping) == plan
    assert plan_mpi(config, None, [False, False], grouping) == MpiPlan()


def test_one_rank_that_may_not_call_mpi_on_threads_keeps_all_on_tcp(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "horo")
    assert plan_mpi(Config(), world(), [True, False], TWO_HOSTS) == MpiPlan()
    assert "by TCP, not by Fake MPI 1.0" in caplog.text
    caplog.clear()
    assert plan_mpi(Config(), world(False), [False, False], ONE_HOST) == MpiPlan()
    assert plan_mpi(Config(transport="tcp"), world(False), [False, False], TWO_HOSTS) == MpiPlan()
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("field", "variable"), [("transport", "HORO_TRANSPORT"), ("cpu_operations", "HORO_CPU_OPERATIONS")]
)
def test_what_cannot_be_is_told_with_the_way_out(field: str, variable: str) -> None:
    config = Config(**{field: "mpi"})
    with pytest.raises(UsageError, match=f"{variable}=mpi, but the ranks of this job did not start through MPI"):
        check_mpi(config, None)
    with pytest.raises(UsageError, match=f"{variable}=mpi, but Fake MPI 1.0 runs with MPI_THREAD_FUNNELED.*'multiple'"):
        check_mpi(config, world(False))
