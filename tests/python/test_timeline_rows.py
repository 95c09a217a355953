"""A timeline whose rank has ended without making it: its rows become events by the command, all but one cut short."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from jobs import wait_until
from trace_events import parse_timeline, rows_of

from horo.timeline import TimelineError
from horo.timeline.__main__ import main
from horo.timeline.recording import Recording, finish
from horo.timeline.rows import ROW

SUBMITTED, AGREED, ENDED, RECORD = 0, 1, 3, 9
HEAD = {"rank": 0, "size": 1, "host": "h", "clock": "c"}


def row(kind: int, *, name: bytes = b"x", number: int = 5, value: int = 4, time_ns: int = 0) -> bytes:
    return ROW.pack(time_ns, value, kind, 0, 0, 0, number, name)


WHOLE = [row(SUBMITTED), row(RECORD, number=1, value=77), row(AGREED), row(ENDED)]


def left_behind(path: Path, rows: Sequence[bytes], *, is_alive: bool = False) -> Recording:
    """A rank that has written these rows and has died, or goes on."""
    recording = Recording({"ops": {0: "allreduce"}, "statuses": {}})

    def write(descriptor: int) -> None:
        os.write(descriptor, b"".join(rows))

    recording.start(str(path), HEAD, write)
    assert json.loads(path.read_text()) == []
    if not is_alive:
        recording.after_fork()  # the lock is let go, as by the end of the process
    return recording


def test_the_command_makes_the_file_and_removes_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    left_behind(path, WHOLE)
    assert main([str(path)]) == 0
    assert rows_of(parse_timeline(path)) == {"x": ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "  SHM_ALLREDUCE"]}
    assert list(tmp_path.iterdir()) == [path]
    assert main([str(path)]) == 0
    assert main([str(tmp_path / "none")]) == 1
    said = capsys.readouterr()
    assert said.out.splitlines() == [f"{path}: made of {path}.rows", f"{path}: is whole; there is no {path}.rows"]
    assert said.err == f"horo.timeline: {tmp_path}/none: there is neither this file nor {tmp_path}/none.rows\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_the_rows_and_how_to_go_on(tmp_path: Path, number: int) -> None:
    path, part = tmp_path / "t.json", tmp_path / "t.json.part"
    left_behind(path, WHOLE)
    os.truncate(f"{path}.rows", 1 << 27)
    command = [sys.executable, "-m", "horo.timeline", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_until(part.exists, "the file is being made")
        process.send_signal(number)
        _, said = process.communicate()
    assert said.splitlines() == [
        f"horo.timeline: makes {path} of 128 MiB of rows, which takes a while",
        f"horo.timeline: interrupted; later: python -m horo.timeline {path}",
    ]
    assert process.returncode == 130
    assert sorted(tmp_path.iterdir()) == [path, Path(f"{path}.rows")]


def test_a_disk_that_is_full_before_the_first_row_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.json"
    monkeypatch.setattr(os, "write", lambda _, data: len(data) - 1)
    with pytest.raises(TimelineError, match=f"'{path}' cannot be written: No space left on device"):
        left_behind(path, WHOLE)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("bytes_left", range(1, ROW.size, 10))
def test_of_rows_that_are_cut_short_only_the_cut_one_is_lost(tmp_path: Path, bytes_left: int) -> None:
    path = tmp_path / "t.json"
    left_behind(path, [*WHOLE[:-1], WHOLE[-1][:bytes_left]])
    assert finish(str(path))
    assert rows_of(parse_timeline(path, is_ended=False))["x"] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "  SHM_ALLREDUCE"]
    assert [event["ph"] for event in parse_timeline(path, is_ended=False)[-3:]] == ["E", "B", "B"]


def test_a_file_that_is_being_written_is_shown_and_left_to_its_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.json"
    recording = left_behind(path, WHOLE[:1], is_alive=True)
    assert not finish(str(path))
    assert json.loads(path.read_text()) == []
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: made of {path}.rows as of now: its rank goes on\n"
    assert rows_of(parse_timeline(path, is_ended=False)) == {"x": ["NEGOTIATE_ALLREDUCE"]}
    recording.finish()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", [b"", b"horo timeline rows 1 ", b"horo timeline rows 1 {}\n", b"[\n]\n"])
def test_rows_that_are_not_by_horo_are_refused_and_the_file_stays(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_text("[]")
    Path(f"{path}.rows").write_bytes(text)
    with pytest.raises(TimelineError, match=f"{path}.rows: has no rows of a timeline of horo"):
        finish(str(path))
    assert path.read_text() == "[]"
    assert sorted(tmp_path.iterdir()) == [path, Path(f"{path}.rows")]


def test_rows_that_others_have_planted_are_not_followed(tmp_path: Path) -> None:
    path, secret = tmp_path / "t.json", tmp_path / "secret"
    secret.write_bytes(b"12345")
    Path(f"{path}.rows").symlink_to(secret)
    with pytest.raises(TimelineError, match="rows: cannot be read"):
        finish(str(path))
    left_behind(path, WHOLE)
    assert secret.read_bytes() == b"12345"
    Path(f"{path}.rows").unlink()
    os.mkfifo(f"{path}.rows")
    with pytest.raises(TimelineError, match="rows: is no regular file"):
        finish(str(path))


def test_the_file_and_its_rows_keep_the_mode_that_the_file_had(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.touch(0o600)
    left_behind(path, WHOLE)
    assert Path(f"{path}.rows").stat().st_mode & 0o777 == 0o600
    finish(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
