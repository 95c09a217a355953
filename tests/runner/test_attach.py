"""``--attach`` to a hororun that is stopped while its queue of connections is full: no wait without an end."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from horo.runner.cli import attach as module
from horo.runner.config import EXIT_UNREACHABLE, JobError
from horo.runner.job.attach_server import address_of


@pytest.fixture
def full() -> Iterator[int]:
    """This process listens as a hororun does, takes nobody, and its queue is full."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(address_of(os.getpid()))
        listener.listen(0)
        first.connect(address_of(os.getpid()))
        yield os.getpid()


def test_a_full_queue_ends_the_wait_with_the_reason(full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CONNECT_S", 1)
    with pytest.raises(JobError, match=f"--attach {full}: no answer within 1 s: it is stopped") as caught:
        module.attach(full, stacks=False)
    assert caught.value.code == EXIT_UNREACHABLE


def test_ctrl_c_ends_the_wait_without_a_traceback(full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", Mock(side_effect=KeyboardInterrupt))
    assert module.attach(full, stacks=True) == 130
