"""A timeline of the core: a whole array of Chrome's trace events at every end, with Horovod's names."""

import json
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from known_answers import adasum_rows, adasums
from ranks import Group, Rank, Written, on_ranks, run_ranks, wait_for
from trace_events import look_at, parse_timeline, rows_of

from horo.core.words import check
from horo.errors import MismatchError, UsageError
from horo.timeline.recording import Recording, finish


def recorded(path: Path, body: Callable[[Rank], object], hosts: Sequence[int] = (1,)) -> list[dict[str, Any]]:
    """What the timeline of rank 0 has of the body, behind a barrier named ``begin``."""

    def run(rank: Rank) -> None:
        rank.barrier("before")
        if rank.rank == 0:
            rank.context.start_timeline(str(path))
        rank.barrier("begin")
        body(rank)
        if rank.rank == 0:
            rank.context.stop_timeline()

    run_ranks(run, hosts)
    return parse_timeline(path)


@pytest.mark.parametrize(
    ("hosts", "via", "levels"), [([2], "SHM", 1), ([1, 1], "TCP", 1), ([3], "SHM", 2), ([2, 3], "TCP", 3)], ids=str
)
def test_an_adasum_has_its_phases(tmp_path: Path, hosts: list[int], via: str, levels: int) -> None:
    rows = rows_of(recorded(tmp_path / "t.json", adasums, hosts))
    expected = adasum_rows(via, levels)
    assert {name: rows[name] for name in expected} == expected


def test_names_are_whole_and_escaped_automatic_ones_share_a_row_and_a_failure_has_its_error(tmp_path: Path) -> None:
    names = ['quote"back\\slash\nline\ttab\x01', "gr\u00f6\u00dfe \U0001f600", "n" * 1000]
    names += ["a" * 40 + ".w", "b" * 40 + ".w"]

    def body(rank: Rank) -> None:
        for name in [*names, *(f"allreduce.noname.{number}" for number in range(50))]:
            rank.allreduce(np.ones(3), name)
        with pytest.raises(MismatchError):
            rank.allreduce(np.ones(3 + rank.rank), "x")

    events = recorded(tmp_path / "t.json", body, [2])
    found = rows_of(events)
    assert found.keys() == {"begin", *names, "allreduce.noname", "x"}
    assert found["x"] == ["NEGOTIATE_ALLREDUCE"]
    assert [e["args"]["error"] for e in events if e["ph"] == "E" and "error" in e.get("args", ())] == ["mismatch"]
    assert found["allreduce.noname"].count("ALLREDUCE") == 50
    ended = [event["args"] for event in events if event["ph"] == "E" and event.get("args", {}).get("bytes")]
    assert {(each["dtype"], each["shape"], each["bytes"]) for each in ended} == {("float64", "[3]", 24)}


@on_ranks([1])
def test_started_and_stopped_a_hundred_times_it_leaves_nothing(rank: Rank, tmp_path: Path) -> None:
    def counts() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))

    context = rank.context
    context.start_timeline(str(tmp_path / "first"))
    context.stop_timeline()
    before = counts()
    for number in range(100):
        path = tmp_path / str(number % 3)
        context.start_timeline(str(path))
        rank.allreduce(np.ones(3), "x")
        context.stop_timeline()
        context.stop_timeline()
        assert rows_of(parse_timeline(path))["x"][-1] == "  SHM_ALLREDUCE"
    # A thread that has ended is listed a moment longer: it may have been counted before, too.
    wait_for(lambda: all(now <= then for now, then in zip(counts(), before, strict=True)))
    assert [event.event for event in context.events()[-4:]] == ["submitted", "agreed", "begun", "ended"]


@on_ranks([1])
def test_a_start_goes_on_in_the_same_file_or_another_one_and_is_refused_without_one(rank: Rank, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    (tmp_path / "link").symlink_to(first)
    rank.context.start_timeline(str(first))
    rank.allreduce(np.ones(3), "a")
    wait_for(lambda: "  SHM_ALLREDUCE" in look_at(first).get("a", ()))
    rank.context.start_timeline(str(tmp_path / "link"), marks_batches=True)
    rank.allreduce(np.ones(3), "b")
    rank.context.start_timeline(str(second))
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path / "none" / "t", "No such file"),
        (Path("/dev/null"), "no regular file"),
        (tmp_path / "folder", "Is a directory"),
        (tmp_path / "pipe", "no regular file"),
        (tmp_path / ("n" * 300), "File name too long"),
    ):
        with pytest.raises(UsageError, match=f"'{path}' cannot be written.*{reason}"):
            rank.context.start_timeline(str(path))
    rank.allreduce(np.ones(3), "c")  # the one before has gone on
    rank.context.stop_timeline()
    events = parse_timeline(first)
    assert rows_of(events).keys() == {"a", "b"}
    assert sum(event["name"] == "CYCLE_START" for event in events if event["ph"] == "i") == 1
    assert rows_of(parse_timeline(second)).keys() == {"c"}


@dataclass
class Recorded:
    """A recorder of the core with a timeline, and its file."""

    lib: Any
    recorder: Any
    path: Path
    recording: Recording

    def stop(self) -> list[dict[str, Any]]:
        self.lib.shim_recorder_stop_timeline(self.recorder)
        self.recording.finish()
        return parse_timeline(self.path, is_ended=False)


@pytest.fixture
def timeline(native: ModuleType, tmp_path: Path) -> Iterator[Recorded]:
    recorder = native.lib.shim_recorder_create()
    made = Recorded(native.lib, recorder, tmp_path / "t", Recording({"ops": {0: "allreduce"}, "statuses": {}}))
    made.recording.start(
        str(made.path), {"rank": 0}, lambda rows: check(native.lib.shim_recorder_start_timeline(recorder, rows), None)
    )
    yield made
    native.lib.shim_recorder_destroy(recorder)


def lost_in(events: list[dict[str, Any]]) -> list[int]:
    """Of each gap, how many events are missing there."""
    return [event["args"]["count"] for event in events if event.get("name") == "EVENTS_LOST"]


def test_more_than_the_ring_holds_is_said_to_be_lost(timeline: Recorded) -> None:
    count = 100_000  # each two records, of which the ring holds 65,536
    timeline.lib.shim_recorder_claim(timeline.recorder)  # who writes the file waits for this one
    timeline.lib.shim_recorder_add_requests(timeline.recorder, count)
    events = timeline.stop()
    lost = lost_in(events)
    ended = sum(event["ph"] == "E" and "args" in event for event in events)
    assert sum(lost) > 0
    assert 0 < ended <= (2 * count - sum(lost) + 1) // 2 + len(lost)


def test_an_event_that_is_being_written_when_the_timeline_stops_is_in_it(timeline: Recorded) -> None:
    """However long that takes."""
    place = timeline.lib.shim_recorder_claim(timeline.recorder)
    timeline.lib.shim_recorder_add_requests(timeline.recorder, 1)
    with ThreadPoolExecutor() as pool:
        stopped = pool.submit(timeline.stop)
        wait_for(lambda: timeline.lib.shim_recorder_is_stopping(timeline.recorder) != 0)
        timeline.lib.shim_recorder_publish(timeline.recorder, place)
        events = stopped.result(timeout=60)
    assert rows_of(events).keys() == {"held", "x"}
    assert lost_in(events) == []


def test_an_event_that_is_never_written_does_not_hold_up_the_end(timeline: Recorded) -> None:
    timeline.lib.shim_recorder_add_requests(timeline.recorder, 1)
    timeline.lib.shim_recorder_claim(timeline.recorder)
    assert lost_in(timeline.stop()) == [1]


@on_ranks([1])
def test_a_full_disk_ends_the_timeline_with_a_warning_alone(rank: Rank, tmp_path: Path, written: Written) -> None:
    path = tmp_path / "t.json"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    rank.context.start_timeline(str(path))
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        for _ in range(200):
            assert rank.allreduce(np.ones(3), "x")[0] == 1
        rank.context.stop_timeline()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    json.loads(path.read_text())  # the room may have been too small for the events, too
    finish(str(path))
    assert len(parse_timeline(path, is_ended=False)) > 100
    assert list(tmp_path.iterdir()) == [path]
    assert written().count("warning: the timeline ends here, since it cannot be written") == 1


def test_the_end_of_the_group_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with Group([1]) as group:
        rank = Rank(group.contexts[0])
        rank.context.start_timeline(str(path))
        rank.allreduce(np.ones(3), "x")
    last = parse_timeline(path)[-1]
    assert (last["name"], last["args"]) == ("HORO_END", {"rank": 0, "reason": "shutdown"})
