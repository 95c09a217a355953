"""Messages of the core reach Python's logging, or stderr; and the flight recorder, written by many threads."""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any

import native_build
import numpy as np
import pytest
import ranks
from jobs import in_child
from ranks import Group, Rank, Written, on_ranks, recorded_stderr, wait_for

from horo.core import context as core
from horo.core import log_lines
from horo.core.context import Context, Event
from horo.errors import AbortedError, PeerLostError, UsageError

INFO, WARNING, ERROR = 2, 3, 4
LATER_NS = 60_000_000_000


class Queue:
    """A queue that nobody takes from, as while a call of the program keeps the interpreter."""

    def __init__(self, native: ModuleType) -> None:
        self._native = native
        self.made = native.lib.horo_create_log_queue()

    def log(self, text: str, level: int = WARNING) -> None:
        self._native.lib.shim_log(self.made, WARNING, level, text.encode())

    def take(self) -> tuple[int, str] | None:
        rank, level, text = (self._native.ffi.new(kind) for kind in ("int32_t *", "int32_t *", "char[2048]"))
        if self._native.lib.horo_take_line(self.made, rank, level, text, 2048) != self._native.lib.HORO_OK:
            return None
        return level[0], self._native.ffi.string(text).decode()

    def check(self, later_ns: int) -> int:
        return int(self._native.lib.shim_log_check(self.made, later_ns))

    def destroy(self) -> None:
        self._native.lib.horo_destroy_log_queue(self.made)
        self.made = self._native.ffi.NULL


@pytest.fixture
def queue(native: ModuleType) -> Iterator[Queue]:
    made = Queue(native)
    yield made
    made.destroy()


def test_messages_are_taken_in_order_with_their_levels_or_written_in_the_end(queue: Queue) -> None:
    with recorded_stderr() as written:
        for level in (INFO, WARNING, ERROR):
            queue.log(f"level {level}", level)
        assert [queue.take() for _ in range(4)] == [*((n, f"level {n}") for n in (INFO, WARNING, ERROR)), None]
        assert queue.check(LATER_NS) == 0
        assert written() == ""
        queue.log("fine", INFO)  # what nobody takes is written in the end if its level is shown
        queue.log("bad")
        assert 0 < queue.check(0) < LATER_NS
        assert written() == ""
        assert queue.check(LATER_NS) == 0
        assert written() == "horo [3] warning: bad\n"
    assert queue.take() is None


def test_a_full_queue_is_written_and_what_is_left_at_the_end_or_comes_late(native: ModuleType, queue: Queue) -> None:
    room = native.lib.shim_log_capacity()
    with recorded_stderr() as written:
        for i in range(room + 1):
            queue.log(str(i))
        assert written() == "".join(f"horo [3] warning: {i}\n" for i in range(room))
    assert queue.take() == (WARNING, str(room))
    with recorded_stderr() as written:
        queue.log("left")
        native.lib.horo_stop_log_queue(queue.made)
        queue.log("late")
        queue.destroy()
        assert written() == "horo [3] warning: late\nhoro [3] warning: left\n"


def test_a_forked_child_writes_to_stderr(queue: Queue) -> None:
    with recorded_stderr() as written:
        in_child(lambda: queue.log("of the child"))
        assert written() == "horo [3] warning: of the child\n"
    assert queue.take() is None


class Kept(logging.Handler):
    """Keeps what it gets, or hangs, or fails."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self._act = act

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self._act()

    def named(self, name: str) -> list[str]:
        return [f"{each.levelname} {each.getMessage()}" for each in self.records if each.name == name]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Kept]]:
    """A handler of the program's; contexts log."""
    monkeypatch.setattr(ranks, "Context", partial(Context, is_logged=True))
    log = logging.getLogger("horo")
    monkeypatch.setattr(log, "level", logging.INFO)
    made: list[Kept] = []

    def make(act: Callable[[], object] = lambda: None) -> Kept:
        made.append(Kept(act))
        log.addHandler(made[-1])
        return made[-1]

    yield make
    for handler in made:
        log.removeHandler(handler)


def wait_in_vain(rank: Rank, until: Callable[[], bool]) -> None:
    """Rank 0 submits nothing before rank 1 has waited for so long that it has told of that."""
    try:
        if rank.rank == 0:
            wait_for(until)
    finally:
        rank.barrier("late")


def test_a_stall_is_a_record_while_all_threads_of_the_program_sleep(kept: Callable[..., Kept]) -> None:
    handler = kept()

    def is_told() -> bool:
        return any("has not submitted 'late'" in text for text in handler.named("horo.engine"))

    with recorded_stderr() as written, Group((2,), stall_warning_ms=300) as group:
        group.run(lambda rank: wait_in_vain(rank, is_told))
        assert written() == ""
    told = handler.named("horo.engine")
    assert any(re.match(r"WARNING waiting for [\d.]+ s for ranks that have not submitted", text) for text in told)


@on_ranks([2])
def test_what_led_to_a_loss_is_logged_before_the_call_fails(rank: Rank, kept: Callable[..., Kept]) -> None:
    handler = kept()
    rank.meet()
    if rank.rank == 0:
        rank.group.kill(0)
        return
    with pytest.raises(PeerLostError):
        rank.barrier("never")
    assert any(text.startswith("ERROR the last events on this rank") for text in handler.named("horo.engine"))


def test_a_message_that_a_handler_refuses_is_written(kept: Callable[..., Kept]) -> None:
    def refuse() -> None:
        raise RuntimeError("this handler is broken")

    kept(refuse)

    with recorded_stderr() as written, Group((2,), stall_warning_ms=300) as group:
        group.run(lambda rank: wait_in_vain(rank, lambda: "has not submitted 'late'" in written()))
        assert "horo [0] warning: waiting for " in written()


def test_a_hanging_handler_holds_up_nothing(kept: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "_END_S", 0.0)
    goes_on = threading.Event()
    handler = kept(lambda: goes_on.wait(60))
    with recorded_stderr():
        with Group((2,), stall_warning_ms=300) as group:
            group.run(lambda rank: wait_in_vain(rank, lambda: bool(handler.records)))
        assert not goes_on.is_set()
    goes_on.set()


def count_log_threads() -> int:
    return sum(thread.name == "horo log" for thread in threading.enumerate())


def test_contexts_of_a_process_share_a_thread_which_ends_with_the_last(kept: Callable[..., Kept]) -> None:
    kept()
    with recorded_stderr():
        with Group((3,)) as group:
            group.run(lambda rank: rank.barrier())
            with Group((2,)):
                assert count_log_threads() == 1
            assert count_log_threads() == 1
        assert count_log_threads() == 0


class LateToLeave:
    """The core, in which the thread that finds out where the program stands is held up, as on a busy machine."""

    def __init__(self) -> None:
        self._lib = core.lib
        self._is_freed = threading.Event()
        self.is_inside = threading.Event()
        self.seen: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)

    def horo_callers(self, *arguments: Any) -> int:
        if threading.current_thread().name == "horo log":
            self.is_inside.set()
            self._is_freed.wait(0.5)  # it is not to be
            self.seen.append("left the core")
        count: int = self._lib.horo_callers(*arguments)
        return count

    def horo_destroy(self, context: Any) -> None:
        self.seen.append("freed")
        self._is_freed.set()
        self._lib.horo_destroy(context)


def test_nothing_is_freed_before_the_thread_that_is_asked_has_left_the_core(
    kept: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = kept()
    held_up = LateToLeave()
    monkeypatch.setattr(core, "lib", held_up)
    with recorded_stderr(), Group((2,), stall_warning_ms=300) as group:
        group.run(lambda rank: wait_in_vain(rank, held_up.is_inside.is_set))
    assert held_up.seen[0] == "left the core"
    assert any("which stands here:\nthread" in text for text in handler.named("horo"))


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
