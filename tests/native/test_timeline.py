"""A timeline of the core: a whole array of Chrome's trace events at every moment, with Horovod's names."""

from __future__ import annotations

import json
import os
import resource
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Group, Rank, run_ranks, wait_for

from horo.errors import MismatchError, UsageError

MEMBERS = {
    "M": {"name", "args"},
    "B": {"name", "ts"},
    "E": {"ts"},
    "X": {"name", "ts", "dur"},
    "i": {"name", "ts", "s"},
}
"""By kind of event, what it must have beside pid and tid."""


def parse(path: Path) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())
    assert isinstance(events, list)
    for event in events:
        assert (
            MEMBERS[event["ph"]] | {"ph", "pid", "tid"}
            <= event.keys()
            <= MEMBERS[event["ph"]] | {*("ph", "pid", "tid", "args")}
        ), event
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times)
    return events


def rows(events: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """What is begun, at its depth, by the name of the row; all that is begun must be ended."""
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    found: dict[str, list[str]] = defaultdict(list)
    depth: dict[int, int] = defaultdict(int)
    for event in events:
        if event["ph"] == "B":
            found[names[event["pid"]]].append("  " * depth[event["pid"]] + event["name"])
            depth[event["pid"]] += 1
        elif event["ph"] == "E":
            depth[event["pid"]] -= 1
            assert depth[event["pid"]] >= 0, event
    assert not any(depth.values()), depth
    return found


@pytest.mark.parametrize(("hosts", "via"), [([2], "SHM"), ([1, 1], "TCP")], ids=str)
def test_an_allreduce_is_negotiated_and_then_moves_data(tmp_path: Path, hosts: list[int], via: str) -> None:
    path = tmp_path / "t.json"

    def body(rank: Rank) -> None:
        rank.barrier("first")
        if rank.rank == 0:
            rank.context.start_timeline(str(path))
        rank.barrier("second")
        rank.allreduce(np.ones((50, 1000), np.float32), "x")
        rank.barrier("third")
        if rank.rank == 0:
            rank.context.stop_timeline()

    run_ranks(body, hosts)
    events = parse(path)
    assert rows(events)["x"] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", f"  {via}_ALLREDUCE"]
    assert rows(events)["third"] == ["NEGOTIATE_BARRIER", "BARRIER"]
    pid = next(e["pid"] for e in events if e["ph"] == "M" and e["args"].get("name") == "x")
    (last,) = [e["args"] for e in events if e["ph"] == "E" and e["pid"] == pid and "args" in e]
    assert (last["dtype"], last["shape"], last["bytes"]) == ("float32", "[50, 1000]", 200_000)
    assert {e["name"] for e in events if e["ph"] == "X"} <= {"0", "1"}


def test_names_are_whole_and_escaped(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    names = [
        'quote"back\\slash\nline\ttab\x01',
        "gr\u00f6\u00dfe \U0001f600",
        "n" * 1000,
        "a" * 40 + ".w",
        "b" * 40 + ".w",
    ]
    with Group([1]) as group:
        rank = Rank(group.contexts[0])
        rank.context.start_timeline(str(path))
        for name in names:
            rank.allreduce(np.ones(3), name)
        rank.context.stop_timeline()
    assert {*names} <= rows(parse(path)).keys()


def test_automatic_names_share_a_row(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with Group([1]) as group:
        rank = Rank(group.contexts[0])
        rank.context.start_timeline(str(path))
        for number in range(50):
            rank.allreduce(np.ones(3), f"allreduce.noname.{number}")
        rank.context.stop_timeline()
    found = rows(parse(path))
    assert found.keys() == {"allreduce.noname"}
    assert found["allreduce.noname"].count("ALLREDUCE") == 50


def test_the_file_is_whole_at_every_moment(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    is_over = threading.Event()
    seen: list[int] = []

    def read() -> None:
        descriptor = os.open(path, os.O_RDONLY)
        while not is_over.is_set():
            text, again = (os.pread(descriptor, 1 << 28, 0) for _ in range(2))
            if text == again:  # else a write fell into the reading
                seen.append(len(json.loads(text)))
        os.close(descriptor)

    with Group([2]) as group:
        group.contexts[0].start_timeline(str(path), marks_batches=True)
        reader = threading.Thread(target=read)
        reader.start()

        def body(rank: Rank) -> None:
            for step in range(2000):
                rank.allreduce(np.ones(10), f"x{step % 10}")

        group.run(body)
        events = 2000 * 8
        wait_for(lambda: bool(seen) and seen[-1] > events)
        is_over.set()
        reader.join()
        assert len(set(seen)) > 2
        group.contexts[0].stop_timeline()
    found = parse(path)
    assert sum(event["ph"] == "i" for event in found) == 2000
    assert {event["name"] for event in found if event["ph"] == "i"} == {"CYCLE_START"}
    assert sum(len(each) for each in rows(found).values()) == 2000 * 3


def test_a_request_that_fails_is_ended_with_its_error(tmp_path: Path) -> None:
    path = tmp_path / "t.json"

    def body(rank: Rank) -> None:
        if rank.rank == 0:
            rank.context.start_timeline(str(path))
        with pytest.raises(MismatchError):
            rank.allreduce(np.ones(3 + rank.rank), "x")
        if rank.rank == 0:
            rank.context.stop_timeline()

    run_ranks(body, [2])
    events = parse(path)
    assert rows(events)["x"] == ["NEGOTIATE_ALLREDUCE"]
    assert [e["args"]["error"] for e in events if e["ph"] == "E" and "args" in e] == ["mismatch"]


def test_started_and_stopped_a_hundred_times_it_leaves_nothing(tmp_path: Path) -> None:
    def counts() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))

    with Group([1]) as group:
        context = group.contexts[0]
        context.start_timeline(str(tmp_path / "first"))
        context.stop_timeline()
        before = counts()
        for number in range(100):
            path = tmp_path / str(number % 3)
            context.start_timeline(str(path))
            Rank(context).allreduce(np.ones(3), "x")
            context.stop_timeline()
            context.stop_timeline()
            assert rows(parse(path))["x"][-1] == "  SHM_ALLREDUCE"
        wait_for(lambda: counts() == before)
        assert [event.event for event in context.events()[-4:]] == ["submitted", "agreed", "begun", "ended"]


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with Group([1]) as group:
        context = group.contexts[0]
        for path, reason in ((tmp_path / "none" / "t", "No such file"), (Path("/dev/null"), "no regular file")):
            with pytest.raises(UsageError, match=f"'{path}' cannot be written.*{reason}"):
                context.start_timeline(str(path))
        context.start_timeline(str(tmp_path / "t"))
        with pytest.raises(UsageError, match="one is being written already"):
            context.start_timeline(str(tmp_path / "u"))
        assert not (tmp_path / "u").exists()


def test_a_full_disk_ends_the_timeline_with_a_warning_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.json"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Group([1]) as group:
        rank = Rank(group.contexts[0])
        rank.context.start_timeline(str(path))
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            for _ in range(200):
                assert rank.allreduce(np.ones(3), "x")[0] == 1
            rank.context.stop_timeline()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert 15_000 < path.stat().st_size <= 20_000
    assert len(json.loads(path.read_text())) > 100
    assert capfd.readouterr().err.count("warning: the timeline ends here, since it cannot be written") == 1


def test_the_end_of_the_group_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with Group([1]) as group:
        rank = Rank(group.contexts[0])
        rank.context.start_timeline(str(path))
        rank.allreduce(np.ones(3), "x")
    last = parse(path)[-1]
    assert (last["name"], last["args"]) == ("HORO_END", {"rank": 0, "reason": "shutdown"})
