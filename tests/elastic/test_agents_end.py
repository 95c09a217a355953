"""Agents of an elastic job at its end."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from horo.runner.config import Job
from horo.runner.elastic.agents import HostsSupervisor
from horo.runner.hosts import HostSpec


class Hosts(HostsSupervisor):
    """Notes which hosts are reached."""

    def __init__(self) -> None:
        host = HostSpec("two", slots=1)
        super().__init__(Job(1, ("true",)), [host], Mock(), {}, Mock(), guard=Mock(), spared=set())
        self.reached: list[str] = []
        self._connect()

    def _take(self, event: object) -> None:
        pass

    def _reach(self, name: str) -> None:
        self.reached.append(name)

    def has_another_soon(self) -> Any:
        """An agent that is to end, after which the host is to have another one."""
        self._remotes[0] = agent = Mock()
        self._leave("two")
        self._again.add(0)
        return agent


@pytest.mark.parametrize("is_over", [False, True])
def test_no_agent_starts_for_a_job_that_is_over(is_over: bool) -> None:
    hosts = Hosts()
    agent = hosts.has_another_soon()
    if is_over:
        hosts._release()
    hosts._on_agent_end(0, agent)
    assert hosts.reached == ([] if is_over else ["two"])


def test_no_agent_starts_after_the_end_by_a_signal() -> None:
    hosts = Hosts()
    agent = hosts.has_another_soon()
    hosts._stop()
    hosts._on_agent_end(0, agent)
    assert hosts.reached == []
