"""Nothing that a rank writes can end hororun or change the exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import Hororun, make_remote_shell

from horo.runner.agent.rank_reports import Note, NoteReader
from horo.runner.job.report import Ending, awaited, report, root_cause

DIGITS = b"9" * 5000


@pytest.mark.parametrize("digits", [DIGITS, b"9" * 12, b"7"])
def test_a_rank_that_points_at_a_number_which_no_rank_has_is_the_cause_itself(digits: bytes) -> None:
    ending = Ending(0, "h", code=3, stderr_tail=b"PeerLostError: rank " + digits + b" is gone\n")
    other = Ending(1, "h", signal=15, asked=True)
    assert root_cause([ending, other]) == ending
    assert b"exited with code 3" in report(ending, [ending, other])
    awaited([ending, other], {})


@given(st.binary(max_size=300) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_note_is_taken_or_passed_over(line: bytes | str) -> None:
    reader = NoteReader()
    reader.feed((line.encode() if isinstance(line, str) else line) + b"\n")
    for name in ("joined", "error", "where", "points_at"):
        reader.feed(b'{"%s": %s}\n' % (name.encode(), line.encode() if isinstance(line, str) else b"[]"))
    ending = Ending(0, "h", code=3, note=reader.note)
    assert root_cause([ending]) == ending
    report(ending, [ending])


@pytest.mark.parametrize(
    "line",
    [b"[" * 60000, b'{"points_at": ' + DIGITS + b"}", b'{"points_at": true}', b'{"points_at": -1}', b'{"x": NaN}'],
    ids=["deep", "digits", "bool", "negative", "nan"],
)
def test_a_note_that_is_none_is_passed_over(line: bytes) -> None:
    reader = NoteReader()
    reader.feed(line + b"\n")
    assert reader.note == Note()
    reader.feed(b'{"joined": true}\n')
    assert reader.note == Note(joined=True)


def test_hororun_survives_a_rank_that_writes_digits_and_notes_without_end(tmp_path: Path) -> None:
    script = (
        "import os\n"
        "fd = int(os.environ['HORO_END_PIPE'].partition(':')[0])\n"
        "os.write(fd, b'[' * 60000 + b'\\n')\n"
        "os.write(2, b'PeerLostError: rank ' + b'9' * 5000 + b' is gone\\n')\n"
        "os._exit(3)\n"
    )
    runner = Hororun(make_remote_shell(tmp_path))
    try:
        done = runner.run("-np", "1", sys.executable, "-S", "-c", script)
    finally:
        runner.clean_up()
    assert done.returncode == 3
    assert "hororun: rank 0 on localhost exited with code 3; the job was ended\n" in done.stderr
