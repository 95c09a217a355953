"""Last words of a rank: the exception that ends it, and the lines of its log."""

import json
import logging
import resource
import traceback
from pathlib import Path

import pytest
from jobs import run_python

from horo.bootstrap import ending
from horo.bootstrap.job import start
from horo.bootstrap.launchers.variables import read_launch
from horo.bootstrap.log import prepare_log
from horo.bootstrap.rendezvous import Rendezvous
from horo.bootstrap.store.protocol import StoreAbandonedError
from horo.errors import AbortedError, GroupError, InternalError, MismatchError, PeerLostError, UsageError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad sample in shard 7"), "ValueError: bad sample in shard 7"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError("two\nlines\x1b[31m"), "ValueError: two\\nlines\\x1b[31m"),
        (ValueError("\u00fc" * 300), "ValueError: " + "\u00fc" * 300),
        (ValueError("x" * 300 + ": use the remedy"), "ValueError: " + "x" * 300 + ": use the remedy"),
    ],
)
def test_an_exception_is_one_line(error: BaseException, text: str) -> None:
    assert ending.describe_exception(error) == text


@pytest.mark.parametrize("character", ["x", "\u00fc", "\n", "\U0001f600", "\0"])
def test_a_long_exception_keeps_its_beginning_and_the_remedy_at_its_end(character: str) -> None:
    """Bytes of it: those that the core keeps, and less than a pipe takes at once."""
    line = ending.describe_exception(ValueError(f"bad sample: {character * 3000}; use another one"))
    assert line.startswith("ValueError: bad sample: ")
    assert line.endswith("; use another one")
    assert len(line.encode()) <= 895
    assert len(json.dumps({"error": line})) < 4096 - 1024


@pytest.mark.parametrize(
    ("error", "status"),
    [
        *[(SystemExit(code), status) for code, status in ((75, 75), (-1, 255), (256, 0), (True, 1), ("75", 1))],
        (KeyboardInterrupt(), 130),
        (ValueError("x"), 1),
    ],
)
def test_the_status_of_a_process_that_an_exception_ends(error: BaseException, status: int) -> None:
    assert ending.exit_status(error) == status


def caught(where: Path, error: str) -> BaseException:
    """The error of a script that calls into horo, which raises."""
    where.write_text(
        f"from horo.bootstrap.launchers.variables import read_launch\ndef train():\n    {error}\ntrain()\n"
    )
    try:
        exec(compile(where.read_text(), str(where), "exec"), {})
    except Exception as raised:
        return raised
    raise AssertionError("it must raise")


def test_the_line_of_the_script_is_named_and_frames_of_horo_are_cut_where_they_add_nothing(tmp_path: Path) -> None:
    error = caught(tmp_path / "train.py", "read_launch({'HORO_RANK': '0'})")
    assert ending.script_line(error.__traceback__) == "train.py, line 3"
    assert ending.script_line(None) == ""
    assert isinstance(error, UsageError)
    assert traceback.extract_tb(error.__traceback__)[-1].name == "_from_hororun"
    ending.shorten_traceback(error)
    assert traceback.extract_tb(error.__traceback__)[-1].name == "train"
    for kind in (InternalError, ValueError):
        error = kind("x")
        try:
            read_launch(_Raising(error))  # type: ignore[arg-type]
        except kind:
            ending.shorten_traceback(error)
        assert len(traceback.extract_tb(error.__traceback__)) > 2


class _Raising:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def get(self, *_: object) -> str:
        raise self._error


def test_the_culprit_is_the_rank_that_the_sentence_begins_with_also_of_a_failed_init() -> None:
    assert ending.culprit_of(None) is None
    assert ending.culprit_of(PeerLostError("rank 12 (h2) is gone: its process ended")) == 12
    assert ending.culprit_of(PeerLostError("horo was shut down on this rank before rank 3")) is None
    assert ending.culprit_of(PeerLostError("this rank is out of reach of rank 2 (h3): no answer for 30 s")) is None
    rendezvous = Rendezvous(None, 0, 3, "h1", 1.0)  # type: ignore[arg-type]
    given_up = rendezvous._aborted(StoreAbandonedError(b"ResourceError\nrank 2 (h3): no memory"))
    assert type(given_up) is AbortedError
    assert ending.culprit_of(given_up) == 2
    assert ending.culprit_of(MismatchError("rank 1 (h2) has another version than rank 0 (h1)")) is None


def test_the_culprit_is_known_also_where_an_error_came_of_one_that_names_it() -> None:
    lost = PeerLostError("rank 1 (h2) ended with ValueError: bad sample")
    own = ValueError("bad sample")
    assert ending.culprit_of_chain(lost) == 1
    assert ending.culprit_of_chain(own) is None
    assert ending.culprit_of_chain(ValueError("rank 1 is not mine")) is None
    own.__cause__ = lost
    assert ending.culprit_of_chain(own) == 1
    behind = SystemExit(3)
    behind.__context__ = own
    assert ending.culprit_of_chain(behind) == 1
    assert ending.culprit_of_chain(UsageError("rank 1 has refused it"), GroupError) is None
    lost.__context__ = behind  # a circle
    lost.args = ("this rank ended",)
    assert ending.culprit_of_chain(behind) is None


STAYS = """
import signal, sys
from horo.bootstrap import ending
ending.watch_exceptions(lambda error, where: ending.stay_behind_cause())
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.3)
{end}
"""


@pytest.mark.parametrize(("end", "code"), [("raise ValueError('x')", 1), ("sys.exit(7)", 7)])
def test_ctrl_c_ends_the_wait_behind_the_cause_and_nothing_else(end: str, code: int) -> None:
    program = STAYS.format(end=end)
    done = run_python("-c", program)
    assert done.returncode == code
    assert "KeyboardInterrupt" not in done.stderr


HOOKED = """
import sys
sys.excepthook = lambda kind, error, traceback: print("mine:", error)
from horo.bootstrap import ending
ending.watch_exceptions(print)
ending.watch_exceptions(print)
raise ValueError("x")
"""


def test_the_hook_that_was_there_is_called_first_and_once() -> None:
    done = run_python("-c", HOOKED)
    assert (done.returncode, done.stdout, done.stderr) == (1, "mine: x\nx <string>, line 7\n", "")


PUT_BACK = """
import sys, threading
before = sys.excepthook, sys.exit, threading.excepthook
from horo.bootstrap import ending
told = []
def watch():
    tell, note = (lambda error, where: told.append(repr(error))), (lambda thread, error: told.append(repr(error)))
    ending.watch_exceptions(tell, note)
def now():
    return sys.excepthook, sys.exit, threading.excepthook
watch()
assert all(a is not b for a, b in zip(before, now()))
try:
    1 / 0
except ZeroDivisionError:
    ending.unwatch_exceptions()  # as in a script whose `finally` leaves the job
assert now() != before
ending.unwatch_exceptions()
assert now() == before
watch()
mine, inner = (lambda *args: inner(*args)), sys.excepthook
sys.excepthook = mine
ending.unwatch_exceptions()
assert now() == (mine, *before[1:])
watch()
assert sys.excepthook is mine
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
import atexit
atexit.register(lambda: print(told))
raise ValueError("x")
"""


def test_what_horo_has_replaced_is_put_back_unless_others_have_replaced_it_since() -> None:
    done = run_python("-c", PUT_BACK)
    assert done.returncode == 1
    assert done.stdout == """["ZeroDivisionError('division by zero')", "ValueError('x')"]\n"""


def test_an_exception_without_a_message_is_described_all_the_same() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert ending.describe_exception(Silent()) == "Silent: (its message cannot be made)"


def bare_logging(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """As in a program that has configured nothing: pytest puts handlers of its own on the root around each test."""
    log = logging.getLogger("horo")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "level", logging.NOTSET)
    monkeypatch.setattr("horo.bootstrap.log._given", [logging.NOTSET])
    return log


def test_a_second_start_says_nothing_twice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    log = bare_logging(monkeypatch)
    prepare_log("warning", 3)
    prepare_log("info", 1)
    log.info("once")
    assert capsys.readouterr().err == "horo [1] info: once\n"


def test_a_program_with_its_own_logging_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    log = bare_logging(monkeypatch)
    logging.getLogger().addHandler(logging.NullHandler())
    prepare_log("warning", 0)
    assert log.handlers == []


@pytest.mark.parametrize("own", [logging.DEBUG, logging.INFO, logging.ERROR])
def test_the_level_of_the_program_stays(monkeypatch: pytest.MonkeyPatch, own: int) -> None:
    log = bare_logging(monkeypatch)
    log.setLevel(own)
    prepare_log("warning", 0)
    assert log.level == own
    log.setLevel(logging.NOTSET)
    prepare_log("warning", 0)
    assert log.level == logging.WARNING
    prepare_log("info", 0)  # the next start of the process has its own
    assert log.level == logging.INFO
    log.setLevel(own + 1)
    prepare_log("warning", 0)
    assert log.level == own + 1


KINDS = ["debug", "info", "warning", "error"]
SHOWN = [("trace", KINDS), *((kind, KINDS[place:]) for place, kind in enumerate(KINDS)), ("off", []), ("fatal", [])]


@pytest.mark.parametrize(("level", "shown"), SHOWN)
def test_each_level_shows_itself_and_what_is_worse_with_the_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: str, shown: list[str]
) -> None:
    log = bare_logging(monkeypatch)
    prepare_log(level, 3)
    for name in KINDS:
        getattr(log, name)("%s", "text")
    assert capsys.readouterr().err == "".join(f"horo [3] {name}: text\n" for name in shown)


def test_messages_of_the_core_of_a_job_are_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    job = start({})
    try:
        job.context.start_timeline(str(tmp_path / "t.json"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        job.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (record,) = [record for record in caplog.records if record.name == "horo.engine"]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("the timeline ends here, since it cannot be written: ")
