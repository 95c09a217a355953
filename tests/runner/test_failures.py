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


def test_hororun_does_not_wait_for_a_rank_that_goes_on(hororun: Hororun) -> None:
    last = (
        "horo.errors.StalledError: rank 0 (h) has not submitted what others wait for, or not gone on with it, for 3 s"
    )
    script = f"test $HOROVOD_RANK = 0 && exec sleep 60; echo '{last}' >&2; exit 5"
    done = hororun.run("-np", "2", "--failure-seconds", "0", "--", "sh", "-c", script)
    assert done.returncode == 5
    assert f"  | {last}\n" in done.stderr


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
