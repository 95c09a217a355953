"""Messages of the core reach Python's logging, and stderr where Python does not come."""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import ranks
from jobs import in_child
from ranks import Group, Rank, on_ranks, recorded_stderr, wait_for

from horo.core import context as core
from horo.core import log_lines
from horo.core.context import Context
from horo.errors import PeerLostError

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
