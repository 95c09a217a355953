"""The flight recorder: what is kept of what many threads write beside a reader, and what ranks note of their work."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import native_build
import numpy as np
import pytest
from jobs import in_child
from ranks import Group, Rank, Written, on_ranks

from horo.core.context import Event
from horo.errors import AbortedError, UsageError

RECORDS = 1024
NAME_BYTES = 32
SUBMITTED, AGREED, BEGUN, ENDED, FAILED, LEFT, LOST = range(7)
ALLREDUCE, ALLGATHER = 0, 1
MISMATCH, PEER_LOST = -3, -40


class Recorder:
    def __init__(self, native: ModuleType) -> None:
        self.native = native
        self.made = native.lib.shim_recorder_create()
        self.kept: list[Any] = []

    def add(
        self, event: int, name: str = "", *, op: int = ALLREDUCE, status: int = 0, number: int = 0, size: int = 0
    ) -> None:
        self.native.lib.shim_recorder_add(self.made, event, op, status, 0, number, size, name.encode())

    def read(self, capacity: int = RECORDS) -> list[Any]:
        events = self.native.ffi.new("horo_event[]", capacity)
        self.kept.append(events)  # what is returned points into it
        return list(events[0 : self.native.lib.shim_recorder_read(self.made, events, capacity)])

    def names(self, capacity: int = RECORDS) -> list[str]:
        return [self.native.ffi.string(event.name).decode() for event in self.read(capacity)]

    def look(self) -> tuple[list[str], int]:
        """The names that the next look of a reader of all events finds, and how many events it misses."""
        events, lost = self.native.ffi.new("horo_event[]", 2 * RECORDS), self.native.ffi.new("uint64_t *")
        count = self.native.lib.shim_recorder_look(self.made, events, len(events), lost)
        return [self.native.ffi.string(event.name).decode() for event in events[0:count]], lost[0]

    def describe(self, lines: int = 16, size: int = 2000) -> list[str]:
        text = self.native.ffi.new("char[]", size)
        self.is_new = self.native.lib.shim_recorder_describe(self.made, lines, text, size)
        return self.native.ffi.string(text).decode().split("\n")[1:]

    def said(self, **options: int) -> list[str]:
        """The lines without their times."""
        lines = self.describe(**options)
        assert all(re.match(r"^ *\d+\.\d{3} s ago  ", line) for line in lines), lines
        return [line.split(" s ago  ")[1] for line in lines]


@pytest.fixture
def recorder(native: ModuleType) -> Iterator[Recorder]:
    made = Recorder(native)
    yield made
    native.lib.shim_recorder_destroy(made.made)


def test_events_come_back_in_order_with_all_they_had(recorder: Recorder) -> None:
    assert recorder.read() == []
    add = recorder.native.lib.shim_recorder_add
    add(recorder.made, FAILED, ALLGATHER, MISMATCH, 65535, -1, (1 << 62) + 1, b"x")
    recorder.add(LOST, op=-1, status=PEER_LOST, number=1 << 20)
    first, second = recorder.read()
    assert (first.event, first.op, first.status, first.team, first.number) == (FAILED, ALLGATHER, MISMATCH, 65535, -1)
    assert (first.bytes, recorder.native.ffi.string(first.name)) == ((1 << 62) + 1, b"x")
    assert (second.event, second.op, second.status, second.number) == (LOST, -1, PEER_LOST, 1 << 20)
    assert first.time_ns <= second.time_ns


@pytest.mark.parametrize("count", [RECORDS - 1, RECORDS, RECORDS + 1, 5 * RECORDS + 7])
def test_the_last_ones_are_kept(recorder: Recorder, count: int) -> None:
    for i in range(count):
        recorder.add(SUBMITTED, str(i))
    kept = [str(i) for i in range(count)][-RECORDS:]
    assert recorder.names() == kept
    assert recorder.names(3) == kept[-3:]
    assert recorder.names(0) == []


def test_of_a_long_name_the_end_is_kept_and_no_character_is_cut(recorder: Recorder) -> None:
    short, long = "s" * NAME_BYTES, "layers.11.attention." + "e" * 20 + ".weight"
    cut_inside = "n" * 20 + "\u00e4" * 15  # 50 bytes: the last 29 begin in the middle of an "ä"
    for name in (short, long, cut_inside):
        recorder.add(SUBMITTED, name)
    assert recorder.names() == [short, "..." + long[-29:], "..." + "\u00e4" * 14]


def test_no_record_is_torn_while_many_write_and_one_reads(recorder: Recorder) -> None:
    lib = recorder.native.lib
    writers, count = 4, 30_000 if native_build.FLAVOUR else 200_000  # many times what there is room for
    end = count + 1  # written while nobody else does, so that it is not lost
    with ThreadPoolExecutor() as pool:
        torn = pool.submit(lib.shim_recorder_read_until, recorder.made, end)
        added = [pool.submit(lib.shim_recorder_add_many, recorder.made, writer, count) for writer in range(writers)]
        for each in added:
            each.result(100)
        lib.shim_recorder_add(recorder.made, SUBMITTED, ALLREDUCE, 0, writers, end, end, f"{writers}.{end}".encode())
        assert torn.result(100) == 0
    for event in recorder.read():
        assert recorder.native.ffi.string(event.name).decode() == f"{event.team}.{event.number}"


def test_an_event_whose_record_is_taken_for_a_whole_turn_of_the_ring_is_not_waited_for(recorder: Recorder) -> None:
    recorder.native.lib.shim_recorder_claim(recorder.made)
    names = [str(number) for number in range(1, RECORDS)]
    for name in [*names, "finds the record taken", "last"]:
        recorder.add(SUBMITTED, name)
    assert recorder.look() == ([*names[1:], "last"], 3)  # the held one, the one that "last" has replaced, and its own


def test_another_process_can_read_it(recorder: Recorder) -> None:
    recorder.add(SUBMITTED, "layer3.weight", size=4 << 20)
    recorder.add(AGREED, "layer3.weight", size=4 << 20)
    recorder.add(BEGUN, "layer3.weight", size=4 << 20, number=1)
    recorder.add(ENDED, "layer3.weight", size=4 << 20)
    recorder.add(SUBMITTED, "a", op=ALLGATHER, size=12)
    recorder.add(FAILED, "a", op=ALLGATHER, size=12, status=MISMATCH)
    recorder.add(SUBMITTED, "b", op=3)
    recorder.add(LOST, op=-1, status=PEER_LOST, number=2)
    recorder.add(LOST, op=-1, status=PEER_LOST, number=-1)
    recorder.add(LEFT, op=-1, number=5)
    assert recorder.said() == [
        "submitted  allreduce 'layer3.weight', 4.0 MiB",
        "began      allreduce 'layer3.weight', 4.0 MiB",
        "finished   allreduce 'layer3.weight', 4.0 MiB",
        "submitted  allgather 'a', 12 bytes",
        "failed     allgather 'a': mismatch error, 12 bytes",
        "submitted  barrier 'b'",
        "the group ended: peer lost, rank 2",
        "the group ended: peer lost",
        "the group ended: rank 5 has shut horo down",
    ]


def test_what_is_alike_shares_a_line_and_what_has_been_described_is_not_new(recorder: Recorder) -> None:
    recorder.describe()
    assert not recorder.is_new
    for i in range(300):
        recorder.add(SUBMITTED, f"g{i}", size=1 << 20)
    recorder.add(AGREED, "g0", size=1 << 20)
    recorder.add(AGREED, "g1", size=1 << 20)
    recorder.add(BEGUN, "g0", size=2 << 20, number=2)
    recorder.add(ENDED, "g0", size=1 << 20)
    recorder.add(ENDED, "g1", size=1 << 20)
    said = [
        "submitted  allreduce 'g0' to allreduce 'g299', 300 in all, 300.0 MiB",
        "began      allreduce 'g0' and 1 more in one batch, 2.0 MiB",
        "finished   allreduce 'g0' to allreduce 'g1', 2 in all, 2.0 MiB",
    ]
    assert recorder.said() == said
    assert recorder.is_new
    assert recorder.said(lines=2) == said[-2:]
    assert not recorder.is_new
    assert recorder.said(size=len("    0.000 s ago  ") + len(said[-1]) + 3) == said[-1:]


def of(rank: Rank, name: str) -> list[Event]:
    return [event for event in rank.context.events() if event.name == name]


@on_ranks([2], [1, 1], [2, 1])
def test_a_rank_notes_each_step_of_an_allreduce_in_order_and_of_a_batch_what_shares_it(rank: Rank) -> None:
    begin_ns = time.monotonic_ns()
    rank.allreduce(np.ones(1000, np.float32), "x")
    end_ns = time.monotonic_ns()
    events = of(rank, "x")
    assert [event.event for event in events] == ["submitted", "agreed", "begun", "ended"]
    assert {(event.op, event.bytes, event.team, event.status) for event in events} == {("allreduce", 4000, 0, "")}
    assert [event.number for event in events] == [0, 0, 1, 0]
    times = [event.time_ns for event in events]
    assert times == sorted(times)
    slack_ns = 20_000_000  # the clocks have been compared for a moment only
    assert begin_ns - slack_ns < times[0]
    assert times[-1] < end_ns + slack_ns
    before = len(rank.context.events())
    handles = [rank.submit("allreduce", f"g{i}", [np.ones(10)], reduce_op=1) for i in range(20)]
    rank.finish(*handles)
    events = rank.context.events()[before:]
    batches = [event for event in events if event.event == "begun"]
    assert sum(batch.number for batch in batches) == 20
    assert sum(batch.bytes for batch in batches) == 20 * 80
    for step in ("submitted", "agreed", "ended"):
        assert sorted(event.name for event in events if event.event == step) == sorted(f"g{i}" for i in range(20))


@on_ranks([1, 2], stall_warning_ms=60_000)
def test_a_shutdown_shows_nothing(rank: Rank, written: Written) -> None:
    rank.allreduce(np.ones(3), "done")
    if rank.rank == 2:
        rank.group.leave(2)
        return
    with pytest.raises(AbortedError):
        rank.allreduce(np.ones(3), "late")
    assert rank.context.events()[-1][1:] == ("left", "", "", 0, 0, 2, "")
    assert written() == ""


def test_events_are_refused_in_a_forked_child_and_after_the_end() -> None:
    with Group([1]) as group:
        context = group.contexts[0]
        Rank(context).barrier()
        assert len(context.events()) == 4

        def be_refused() -> None:
            with pytest.raises(UsageError, match="forked"):
                context.events()

        in_child(be_refused)
    with pytest.raises(UsageError, match="shut down"):
        context.events()
