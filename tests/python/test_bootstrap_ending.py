"""The exception that ends a rank: how it is described, and what is left of its traceback."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from horo._bootstrap import ending
from horo._bootstrap.ending import culprit_of, describe_exception, exit_status, script_line, shorten_traceback
from horo._bootstrap.launchers.environment import read_launch
from horo.errors import InternalError, PeerLostError, UsageError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad sample in shard 7"), "ValueError: bad sample in shard 7"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError("two\nlines\x1b[31m"), "ValueError: two\\nlines\\x1b[31m"),
        (ValueError("\u00fc" * 300), f"ValueError: {chr(0xFC) * 185}..."),
        (ValueError("\n" * 300), "ValueError: " + "\\n" * 92 + "\\..."),
    ],
)
def test_an_exception_is_one_bounded_line(error: BaseException, text: str) -> None:
    assert describe_exception(error) == text


@pytest.mark.parametrize(
    ("error", "status"),
    [
        *[(SystemExit(code), status) for code, status in ((75, 75), (-1, 255), (256, 0), (True, 1), ("75", 1))],
        (KeyboardInterrupt(), 130),
        (ValueError("x"), 1),
    ],
)
def test_the_status_of_a_process_that_an_exception_ends(error: BaseException, status: int) -> None:
    assert exit_status(error) == status


def test_an_exception_without_a_message_is_described_all_the_same() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert describe_exception(Silent()) == "Silent: (its message cannot be made)"


def caught(where: Path, error: str) -> BaseException:
    """The error of a script that calls into horo, which raises."""
    where.write_text(
        f"from horo._bootstrap.launchers.environment import read_launch\ndef train():\n    {error}\ntrain()\n"
    )
    try:
        exec(compile(where.read_text(), str(where), "exec"), {})
    except Exception as raised:
        return raised
    raise AssertionError("it must raise")


def test_the_line_of_the_script_is_named(tmp_path: Path) -> None:
    error = caught(tmp_path / "train.py", "read_launch({'HORO_RANK': '0'})")
    assert script_line(error.__traceback__) == "train.py, line 3"
    assert script_line(None) == ""


def test_frames_of_horo_are_cut_off_the_end_of_its_errors(tmp_path: Path) -> None:
    error = caught(tmp_path / "train.py", "read_launch({'HORO_RANK': '0'})")
    assert isinstance(error, UsageError)
    assert traceback.extract_tb(error.__traceback__)[-1].name == "_from_hororun"
    shorten_traceback(error)
    assert traceback.extract_tb(error.__traceback__)[-1].name == "train"


def test_frames_stay_where_they_say_something(tmp_path: Path) -> None:
    for kind in (InternalError, ValueError):
        error = kind("x")
        try:
            read_launch(_Raising(error))  # type: ignore[arg-type]
        except kind:
            shorten_traceback(error)
        assert len(traceback.extract_tb(error.__traceback__)) > 2


class _Raising:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def get(self, *_: object) -> str:
        raise self._error


def test_the_culprit_is_the_rank_that_the_sentence_begins_with() -> None:
    assert culprit_of(None) is None
    assert culprit_of(PeerLostError("rank 12 (h2) is gone: its process ended")) == 12
    assert culprit_of(PeerLostError("horo was shut down on this rank before rank 3")) is None


def test_an_error_blames_another_rank_also_where_it_came_of_one_that_does() -> None:
    lost = PeerLostError("rank 1 (h2) ended with ValueError: bad sample")
    own = ValueError("bad sample")
    assert ending.blames_another(lost)
    assert not ending.blames_another(own)
    assert not ending.blames_another(ValueError("rank 1 is not mine"))
    own.__cause__ = lost
    assert ending.blames_another(own)
    behind = SystemExit(3)
    behind.__context__ = own
    assert ending.blames_another(behind)
    lost.__context__ = behind  # a circle
    lost.args = ("this rank ended",)
    assert not ending.blames_another(behind)


STAYS = """
import signal, sys
from horo._bootstrap import ending
ending.watch_exceptions(lambda error, where: ending.stay_behind_cause())
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.3)
{end}
"""


@pytest.mark.parametrize(("end", "code"), [("raise ValueError('x')", 1), ("sys.exit(7)", 7)])
def test_ctrl_c_ends_the_wait_behind_the_cause_and_nothing_else(end: str, code: int) -> None:
    program = STAYS.format(end=end)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code
    assert "KeyboardInterrupt" not in done.stderr


HOOKED = """
import sys
sys.excepthook = lambda kind, error, traceback: print("mine:", error)
from horo._bootstrap import ending
ending.watch_exceptions(print)
ending.watch_exceptions(print)
raise ValueError("x")
"""


def test_the_hook_that_was_there_is_called_first_and_once() -> None:
    done = subprocess.run([sys.executable, "-c", HOOKED], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "mine: x\nx <string>, line 7\n", "")


def test_an_exception_does_not_end_an_interactive_process() -> None:
    done = subprocess.run(
        [sys.executable, "-i", "-c", HOOKED],
        input="print('on')\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "mine: x\non\n"
