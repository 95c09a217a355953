"""The stacks in a report about waiting ranks end at the line of the program, not inside horo."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import horo
from horo.diagnostics import deadlock
from horo.diagnostics.deadlock import OwnThread, describe_stacks

INSIDE = str(Path(horo.__file__).with_name("_somewhere.py"))


def functions_of_a_thread(code: str, run: Callable[[dict[str, Any]], None]) -> list[str]:
    """The functions in which a thread is said to stand, the innermost last, while ``end.wait()`` blocks in it."""
    begun, end = threading.Event(), threading.Event()
    names: dict[str, Any] = {"begun": begun, "end": end}
    exec(compile(code, INSIDE, "exec"), names)
    thread = threading.Thread(target=run, args=(names,), name="trainer")
    thread.start()
    try:
        assert begun.wait(60)
        said = describe_stacks([thread.ident or 0]).partition("thread 'trainer':")[2]
    finally:
        end.set()
        thread.join()
    return [line.rpartition(" in ")[2] for line in said.splitlines() if line.startswith('  File "')]


def test_calls_inside_horo_are_left_out_at_the_end() -> None:
    def train(module: dict[str, Any]) -> None:
        module["allreduce"]()

    code = "def allreduce():\n    run()\ndef run():\n    begun.set()\n    end.wait(60)\n"
    assert functions_of_a_thread(code, train)[-1] == "train"


def test_calls_that_horo_makes_of_the_program_stay() -> None:
    def train(module: dict[str, Any]) -> None:
        def compress() -> None:
            module["begun"].set()
            module["end"].wait(60)

        module["step"](compress)

    found = functions_of_a_thread("def step(call):\n    call()\n", train)
    assert found[found.index("train") :][:3] == ["train", "step", "compress"]


@pytest.mark.parametrize(("kind", "others"), [(threading.Thread, "thread 'busy'"), (OwnThread, "")])
def test_a_log_handler_in_a_thread_of_horo_is_no_thread_that_may_submit(
    monkeypatch: pytest.MonkeyPatch, kind: type[threading.Thread], others: str
) -> None:
    begun, end = threading.Event(), threading.Event()

    def handle() -> None:
        begun.set()
        while not end.is_set():  # it computes, in a file that is no library's
            pass

    thread = kind(target=handle, name="busy")
    thread.start()
    try:
        assert begun.wait(60)
        frame = sys._current_frames()[thread.ident or 0]
        monkeypatch.setattr(deadlock, "current_frames", lambda: {thread.ident: frame})
        blocked = deadlock.describe_blocked(object(), handle.__code__, [], is_alone=True)
    finally:
        end.set()
        thread.join()
    assert blocked == deadlock.Blocked([], others)
