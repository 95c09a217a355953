"""Jobs in which a rank fails: hororun names that rank and nobody else, and the others see why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from failing_rank import find_wrong
from jobs import Flags, Hororun

RANK = """
import atexit, os, sys, time
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
        "hororun: the others: rank 0 killed by SIGTERM when told to end",
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
        f"hororun: rank 1 on {host} ended with ValueError: bad sample (train.py, line 9; killed by SIGTERM when told "
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
        "hororun: no rank called init() of horo: for horo, 2 copies ran side by side; is hvd.init() missing?\n",
    )
    assert hororun.run("-np", "1", "train.py", cwd=tmp_path).stderr == ""
    assert hororun.run("-np", "2", "true").stderr == ""
    (tmp_path / "train.py").write_text(INIT + "bootstrap.start()\n")
    assert hororun.run("-np", "2", "train.py", cwd=tmp_path).stderr == ""


HEAD = """import os, sys, threading, time
from horo.bootstrap import job as bootstrap
job = bootstrap.start()
import atexit
atexit.register(job.close)
deadline = time.monotonic() + 60
def others_end():
    while job.context.health() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    print(f"{job.rank} hears: {job.context.health()}")
"""


def run(hororun: Hororun, folder: Path, last: str, where: str = "localhost:8") -> tuple[int, str, list[str]]:
    """The code of a job in which rank 0 ends by ``last``, what hororun says of it, and what rank 1 hears."""
    (folder / "train.py").write_text(HEAD + "if job.rank == 1:\n    others_end()\nelse:\n" + last)
    done = hororun.run("-np", "2", "--no-prefix", "--failure-seconds", "20", "train.py", where=where, cwd=folder)
    return done.returncode, done.stderr, done.stdout.splitlines()


@pytest.mark.parametrize(("status", "code"), [("7", 7), ("'no data in /x'", 1), ("-1", 255)])
def test_a_code_that_is_not_0_is_heard_with_its_words(
    hororun: Hororun, where: str, tmp_path: Path, status: str, code: int
) -> None:
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
    script = (
        HEAD
        + """
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
    )
    (tmp_path / "train.py").write_text(script)
    done = hororun.run("-np", "1", "--no-prefix", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
