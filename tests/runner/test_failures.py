"""Jobs in which a rank fails: what it leaves of its end, who is blamed, and what the others see."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from failing_rank import find_wrong
from hypothesis import given
from hypothesis import strategies as st
from jobs import Flags, Hororun

from horo.bootstrap.ending import EndReporter
from horo.config.hosts import ranges
from horo.runner.agent.rank_reports import Note, NoteReader, open_pipe
from horo.runner.job.report import Ending, awaited, exit_code, report, root_cause

RANK = """
import atexit, os, sys, threading, time
from horo.bootstrap import job as bootstrap
job = bootstrap.start()
atexit.register(job.close)
"""


@pytest.mark.parametrize("seed", range(6))
def test_a_random_failure_is_blamed_on_its_rank(hororun: Hororun, seed: int) -> None:
    assert find_wrong(seed, hororun.remote_shell) == ""


def test_an_exception_is_reported_with_its_line_and_shown_once(hororun: Hororun, where: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANK + "if job.rank == 1:\n    raise ValueError('bad sample')\ntime.sleep(60)\n")
    done = hororun.run("-np", "2", "--failure-seconds", "0.1", "train.py", where=where, cwd=tmp_path)
    host = "localhost" if where.startswith("localhost") else "one"
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "[1] Traceback (most recent call last):",
        f'[1]   File "{script}", line 7, in <module>',
        "[1]     raise ValueError('bad sample')",
        "[1] ValueError: bad sample",
        f"hororun: rank 1 on {host} ended with ValueError: bad sample (train.py, line 7; exited with code 1); "
        "the job was ended",
        "hororun: the others: rank 0 killed by SIGTERM when asked to end",
    ]


def test_the_others_get_a_moment_before_they_are_told_to_end(hororun: Hororun, where: str, flags: Flags) -> None:
    script = "test $HOROVOD_RANK = 0 && exit 7; while kill -0 {} 2> /dev/null; do :; done; "
    script += f": > {flags.folder}/saved.$HOROVOD_RANK"
    script = script.format(f"$(cat {flags.folder}/pid)")
    begin = f"test $HOROVOD_RANK = 0 && echo $$ > {flags.folder}/pid; while ! test -s {flags.folder}/pid; do :; done"
    script = f"{begin}\n{script}"
    done = hororun.run("-np", "2", "--failure-seconds", "30", "--", "sh", "-c", script, where=where)
    assert done.returncode == 7
    assert done.stderr.splitlines()[-1] == "hororun: the others: rank 1 exited with code 0"
    flags.wait(["saved.1"])


def test_a_rank_that_ends_long_after_its_victim_is_the_cause(hororun: Hororun, where: str, tmp_path: Path) -> None:
    # Its end takes longer than hororun waits for it; what it has said is enough.
    script = RANK.replace("job =", "if os.environ['HOROVOD_RANK'] == '1':\n    atexit.register(time.sleep, 60)\njob =")
    script += "if job.rank == 1:\n    raise ValueError('bad sample')\n"
    script += "while job.context.health() is None:\n    time.sleep(0.01)\nsys.exit(3)\n"
    (tmp_path / "train.py").write_text(script)
    done = hororun.run("-np", "2", "--failure-seconds", "0", "train.py", where=where, cwd=tmp_path)
    assert done.returncode == 1
    host = "localhost" if where.startswith("localhost") else "one"
    assert done.stderr.splitlines()[-2:] == [
        f"hororun: rank 1 on {host} ended with ValueError: bad sample (train.py, line 9; killed by SIGTERM when asked "
        "to end); the job was ended",
        "hororun: the others: rank 0 exited with code 3",
    ]


def test_notes_pass_through_a_shell(hororun: Hororun, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANK + "raise ValueError('x')\n")
    command = ["sh", "-c", f"{sys.executable} train.py 2> /dev/null"]
    done = hororun.run("-np", "1", "--", *command, cwd=tmp_path)
    assert done.returncode == 1
    assert "ended with ValueError: x (train.py, line 6; exited with code 1)" in done.stderr


INIT = "import os, sys\nfrom horo.bootstrap import job as bootstrap\n"


@pytest.mark.parametrize(
    ("way", "how"), [("sys.exit(0)", "exited with code 0"), ("os.kill(os.getpid(), 9)", "killed by SIGKILL")]
)
def test_nobody_waits_for_a_rank_that_ends_before_init(hororun: Hororun, tmp_path: Path, way: str, how: str) -> None:
    (tmp_path / "train.py").write_text(INIT + f"if os.environ['HOROVOD_RANK'] == '0':\n    {way}\nbootstrap.start()\n")
    done = hororun.run("-np", "2", "--failure-seconds", "20", "--start-timeout", "1000", "train.py", cwd=tmp_path)
    assert done.returncode == (1 if "exit" in way else 137)
    assert "PeerLostError: init() was given up because another rank failed: rank 0 (" in done.stderr
    assert f") {how} before it called init()" in done.stderr


def test_a_rank_that_is_not_asked_for_may_end_early(hororun: Hororun, tmp_path: Path) -> None:
    script = INIT + "if os.environ['HOROVOD_RANK'] == '0':\n    sys.exit(0)\nprint(bootstrap.start(comm=[1, 2]).size)\n"
    (tmp_path / "train.py").write_text(script)
    done = hororun.run("-np", "3", "--no-prefix", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "2\n2\n"), done.stderr


def test_ranks_that_never_called_init_are_said_to_have_run_side_by_side(hororun: Hororun, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = hororun.run("-np", "2", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        0,
        "hororun: no rank called init() of horo: for horo, 2 copies ran side by side; is hvd.init() missing, or do "
        "they train by another backend of torch.distributed?\n",
    )
    assert hororun.run("-np", "1", "train.py", cwd=tmp_path).stderr == ""
    assert hororun.run("-np", "2", "true").stderr == ""
    (tmp_path / "train.py").write_text(INIT + "bootstrap.start()\n")
    assert hororun.run("-np", "2", "train.py", cwd=tmp_path).stderr == ""


HEAD = f"""{RANK}deadline = time.monotonic() + 60
def others_end():
    while job.context.health() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    print(f"{{job.rank}} hears: {{job.context.health()}}")
"""


def run(hororun: Hororun, folder: Path, last: str, where: str = "localhost:8") -> tuple[int, str, list[str]]:
    """The code of a job in which rank 0 ends by ``last``, what hororun says of it, and what rank 1 hears."""
    (folder / "train.py").write_text(HEAD + "if job.rank == 1:\n    others_end()\nelse:\n" + last)
    done = hororun.run("-np", "2", "--no-prefix", "--failure-seconds", "20", "train.py", where=where, cwd=folder)
    return done.returncode, done.stderr, done.stdout.splitlines()


@pytest.mark.parametrize(("status", "code"), [("7", 7), ("'no data in /x'", 1), ("-1", 255)])
def test_a_code_is_heard_with_its_words(hororun: Hororun, where: str, tmp_path: Path, status: str, code: int) -> None:
    words = f"SystemExit: {eval(status)}"
    ended, said, (heard,) = run(hororun, tmp_path, f"    sys.exit({status})\n", where)
    assert ended == code
    assert heard.startswith("1 hears: rank 0 (")
    assert heard.endswith(f") ended with {words}")
    assert f"ended with {words} (train.py, line 15; exited with code {code}); the job was ended" in said


@pytest.mark.parametrize(
    "last",
    [
        "sys.exit(0)",
        # what is caught ends nothing
        "\n    try:\n        sys.exit(7)\n    except SystemExit as error:\n        assert error.code == 7",
        "\n    thread = threading.Thread(target=sys.exit, args=(7,))\n    thread.start()\n    thread.join()",
        # Python 3.12 and later warn of a fork beside torch's threads
        "\n    import warnings\n    warnings.simplefilter('ignore')"
        "\n    if os.fork() == 0:\n        sys.exit(7)\n    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7",
    ],
)
def test_an_end_in_order_is_a_shutdown(hororun: Hororun, tmp_path: Path, last: str) -> None:
    ended, said, heard = run(hororun, tmp_path, f"    {last}\n")
    assert (ended, said) == (0, "")
    assert len(heard) == 1
    assert heard[0].endswith("has shut horo down")


def test_the_exception_is_pythons_own_to_the_script(hororun: Hororun, tmp_path: Path) -> None:
    script = """
import pickle, traceback
try:
    try:
        1 / 0
    except ZeroDivisionError:
        sys.exit(7)
except SystemExit as error:
    assert (str(error), error.args, error.code, type(error).__name__) == ("7", (7,), 7, "SystemExit")
    assert isinstance(error.__context__, ZeroDivisionError)
    assert traceback.format_exception_only(type(error), error) == ["SystemExit: 7\\n"]
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.code) == (SystemExit, 7)
    error.code = 0
    raise
"""
    (tmp_path / "train.py").write_text(HEAD + script)
    done = hororun.run("-np", "1", "--no-prefix", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


LOST = b"Traceback ...\nhoro.errors.PeerLostError: allreduce 'w': rank %d (h2) is gone\n"


def told_to_end(rank: int) -> Ending:
    return Ending(rank, "h", signal=15, asked=True)


AFTER_2 = Ending(0, "h1", code=1, stderr_tail=LOST % 2)
SAYS_2 = Ending(0, "h1", code=1, stderr_tail=LOST % 3, note=Note(error="PeerLostError: x", points_at=2))
OWN_ERROR = Ending(2, "h2", code=5, stderr_tail=LOST % 0, note=Note(error="KeyError: y"))
CAUSES: dict[str, tuple[list[Ending], int | None, int]] = {
    "none without a failure": ([Ending(0, "h"), told_to_end(1)], None, 0),
    "the first in time": ([Ending(3, "h"), Ending(1, "h", code=7), Ending(0, "h", code=1), told_to_end(2)], 1, 7),
    "the one that its victim points at": ([AFTER_2, Ending(2, "h2", signal=9), told_to_end(1)], 1, 137),
    "not one that was told to end": ([AFTER_2, told_to_end(2)], 0, 1),
    "a lost host, even if known later": ([AFTER_2, Ending(2, "h2", lost="ssh ended", asked=True)], 1, 69),
    "by what a rank says, not by its last words": ([SAYS_2, Ending(3, "h2", code=4), OWN_ERROR], 2, 5),
}


@pytest.mark.parametrize("case", CAUSES)
def test_the_cause_and_its_exit_code(case: str) -> None:
    endings, place, code = CAUSES[case]
    cause = root_cause(endings)
    assert cause == (None if place is None else endings[place])
    assert cause is None or exit_code(cause) == code


def test_a_rank_with_its_own_error_or_that_has_ended_well_too_early_is_the_cause() -> None:
    late = Ending(1, "h", signal=15, asked=True, note=Note(error="ValueError: bad sample", where="train.py, line 7"))
    endings = [Ending(0, "h", code=3, note=Note(points_at=1)), late]
    assert root_cause(endings) == late
    assert exit_code(late) == 1
    assert report(late, endings) == (
        b"hororun: rank 1 on h ended with ValueError: bad sample (train.py, line 7; killed by SIGTERM when asked to "
        b"end); the job was ended\nhororun: the others: rank 0 exited with code 3\n"
    )
    unseen = replace(late, stderr_tail=b"Traceback\n" + b"  line\n" * 30)
    assert report(unseen, endings).count(b"  | ") == 0
    assert report(unseen, endings, shown=False).count(b"\n  | ") == 31
    words = "rank 1 (h) came to the end of its script after 30 steps, while rank 0 is in step 31: use drop_last"
    waits = Ending(0, "h", code=1, note=Note(error=f"AbortedError: {words}", where="train.py, line 7", points_at=1))
    endings = [Ending(1, "h"), waits]
    assert root_cause(endings) == waits
    cause, others = report(waits, endings).decode().splitlines()
    end = "so rank 0 on h ended with AbortedError (train.py, line 7; exited with code 1); the job was ended"
    assert cause == f"hororun: {words}; {end}"
    assert others == "hororun: the others: rank 1 exited with code 0"


@pytest.mark.parametrize(("status", "code"), [(75, 75), (255, 255), (0, 1)])
def test_a_rank_that_did_not_come_to_the_end_of_its_exit_has_its_code(status: int, code: int) -> None:
    note = Note(error="SystemExit: something", status=status)
    assert exit_code(Ending(1, "h", signal=15, asked=True, note=note)) == code
    assert exit_code(Ending(1, "h", signal=10, passed_on=True, note=note)) == code
    assert exit_code(Ending(1, "h", signal=10, note=note)) == 138
    assert exit_code(Ending(1, "h", signal=10, passed_on=True)) == 138


def test_the_rank_that_the_first_failure_points_at_is_awaited_until_its_end_is_known() -> None:
    first, second = Ending(0, "h", code=1, stderr_tail=LOST % 1), Ending(1, "h", code=1, note=Note(points_at=2))
    assert awaited([], {}) is None
    assert awaited([Ending(0, "h", code=1)], {}) is None
    assert awaited([first], {}) == 1
    assert awaited([first], {1: Note(joined=True)}) == 1
    assert awaited([first], {1: Note(error="KeyError: 3")}) is None
    assert awaited([first], {1: Note(error="PeerLostError: rank 2", points_at=2)}) == 2
    assert awaited([first, second], {}) == 2
    assert awaited([first, second, Ending(2, "h")], {}) is None
    assert awaited([first, Ending(1, "h", code=1, note=Note(points_at=0))], {}) is None


def test_the_report_names_rank_host_end_and_last_words_then_the_others() -> None:
    cause = Ending(2, "h2", signal=11, stderr_tail=b"".join(b"line %d\r\n" % n for n in range(30)) + b"\xff end\n\n")
    others = [Ending(5, "h2"), Ending(0, "h1", signal=15, asked=True), Ending(1, "h1", signal=15, asked=True)]
    text = report(cause, [cause, *others])
    lines = text.split(b"\n")
    assert lines[0] == b"hororun: rank 2 on h2 was killed by SIGSEGV; the job was ended"
    assert b"  | line 11" in lines
    assert b"  | line 10" not in lines
    assert b"  | \xff end" in lines
    assert lines[-2] == b"hororun: the others: ranks 0-1 killed by SIGTERM when asked to end; rank 5 exited with code 0"


@given(st.sets(st.integers(0, 50), min_size=1))
def test_ranges_name_exactly_the_numbers(numbers: set[int]) -> None:
    named: list[int] = []
    for part in ranges(sorted(numbers)).split(","):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(numbers)


def read(reader: NoteReader, fd: int) -> Note:
    reader.feed(os.read(fd, 1 << 16))
    return reader.note


def test_a_note_arrives_as_it_was_written() -> None:
    read_fd, write_fd, name = open_pipe()
    reader, notes = NoteReader(), EndReporter(name, ranks=(4, 6))
    notes.joined()
    assert read(reader, read_fd) == Note(joined=True)
    notes.lost(1)
    assert read(reader, read_fd) == Note(joined=True, points_at=6)
    notes.ended("SystemExit: \u00e4", "train.py, line 7", None, 75)
    assert read(reader, read_fd) == Note(True, False, "SystemExit: \u00e4", "train.py, line 7", 6, 75)
    notes.lost(None)
    with pytest.raises(BlockingIOError):
        os.read(read_fd, 1)
    os.close(read_fd)
    notes.joined()  # nobody reads any more: not this rank's business
    os.close(write_fd)


def test_a_number_that_is_another_file_by_now_is_not_written_to() -> None:
    read_fd, write_fd, name = open_pipe()
    inode = name.partition(":")[2]
    other_read, other_write = os.pipe()
    for wrong in (None, "", "x", name.partition(":")[0], f"{other_write}:{inode}", f"0:{inode}", f"99999:{inode}"):
        EndReporter(wrong).joined()
    for fd in (read_fd, other_read):
        os.set_blocking(fd, False)
        with pytest.raises(BlockingIOError):
            os.read(fd, 1)
    for fd in (read_fd, write_fd, other_read, other_write):
        os.close(fd)
