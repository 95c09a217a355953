"""The timeline that the environment asks for, where it cannot begin."""

from __future__ import annotations

from typing import Any

import pytest

from horo.bootstrap import timeline_file as timeline
from horo.config.table import read_config
from horo.errors import HoroError, ResourceError, UsageError


@pytest.mark.parametrize("kind", [UsageError, ResourceError])
def test_the_job_is_left_and_the_error_is_of_its_kind(monkeypatch: pytest.MonkeyPatch, kind: type[HoroError]) -> None:
    """A file may be named wrong; a thread that cannot be started is no mistake of the caller's."""
    left: list[bool] = []

    class Job:
        def close(self) -> None:
            left.append(True)

    def refuse(*_: object, **__: object) -> None:
        raise kind("it cannot be")

    monkeypatch.setattr(timeline, "start_timeline", refuse)
    job: Any = Job()
    with pytest.raises(HoroError, match=r"^HORO_TIMELINE: it cannot be$") as caught:
        timeline.begin_timeline(job, read_config({"HORO_TIMELINE": "t.json"}))
    assert type(caught.value) is kind
    assert left == [True]
