"""A rank that ends by ``sys.exit`` with a code that is not 0 has failed: the others hear it, and hororun says where."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import Hororun

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
