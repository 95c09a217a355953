"""Timelines: what a rank has left behind becomes a file, and those of several ranks one, whatever their clocks say."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from jobs import run_python, wait_until
from trace_events import parse_timeline, rows_of, write

from horo.bootstrap import timeline_file as timeline
from horo.config.table import read_config
from horo.errors import HoroError, ResourceError, UsageError
from horo.timeline import TimelineError, merge
from horo.timeline.__main__ import main
from horo.timeline.recording import Recording, finish
from horo.timeline.rows import ROW


def steps_of(ranks: int, count: int, every_us: float, seed: int = 1) -> list[list[tuple[float, float, float]]]:
    """True times of allreduces, by rank: a rank begins when all have submitted, and ends when all have begun."""
    draw = random.Random(seed)
    found: list[list[tuple[float, float, float]]] = [[] for _ in range(ranks)]
    for number in range(count):
        submitted = [1000 + number * every_us + draw.uniform(0, 300) for _ in range(ranks)]
        begun = [max(submitted) + draw.uniform(20, 200) for _ in range(ranks)]
        for rank in range(ranks):
            found[rank].append((submitted[rank], begun[rank], max(begun) + draw.uniform(20, 200)))
    return found


def begins(events: Sequence[dict[str, Any]], rank: int) -> list[float]:
    return [event["ts"] for event in events if event["ph"] == "B" and event["pid"] == rank]


def errors_of(out: Path, ranks: int, steps: list[list[tuple[float, float, float]]]) -> list[float]:
    """How far off each beginning is, relative to rank 0's first one."""
    events = parse_timeline(out)
    true_zero, zero = steps[0][0][0], begins(events, 0)[0]
    return [
        (shown - zero) - (true - true_zero)
        for rank in range(ranks)
        for shown, true in zip(begins(events, rank), (t for s, b, _ in steps[rank] for t in (s, b, b)), strict=True)
    ]


def test_ranks_of_one_clock_keep_their_times_and_get_a_process_each(tmp_path: Path) -> None:
    steps = steps_of(3, 20, 1000)
    files = [write(tmp_path / f"{rank}", rank, "a", lambda t: t + 5e9, steps[rank], size=3) for rank in range(3)]
    said = merge(str(tmp_path / "out"), files[::-1])
    assert [line.partition(", ")[2][:10] for line in said] == ["360 events"]
    assert max(abs(error) for error in errors_of(tmp_path / "out", 3, steps)) < 0.01
    events = parse_timeline(tmp_path / "out")
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    assert names == {rank: f"rank {rank} on ha" for rank in range(3)}


@pytest.mark.parametrize("offset_us", [0.0, 3e6, -7.25e11])
def test_clocks_that_differ_are_aligned_by_what_the_ranks_did_together(tmp_path: Path, offset_us: float) -> None:
    steps = steps_of(2, 200, 1000)
    files = [
        write(tmp_path / "0", 0, "a", lambda t: t + 8e11, steps[0]),
        write(tmp_path / "1", 1, "b", lambda t: t + 8e11 + offset_us, steps[1]),
    ]
    _, remark = merge(str(tmp_path / "out"), files)
    assert remark.startswith("hb: its times are right to ")
    within = float(remark.split("right to ")[1].split(" us")[0])
    assert within < 60  # the closest of 200 pairs, of delays from 20 to 200 us
    errors = errors_of(tmp_path / "out", 2, steps)
    assert max(abs(error) for error in errors) <= within + 0.1


def test_a_clock_that_runs_faster_is_followed(tmp_path: Path) -> None:
    steps = steps_of(2, 3000, 10_000)  # half a minute, in which 1000 ppm make 30 ms
    files = [
        write(tmp_path / "0", 0, "a", lambda t: t, steps[0]),
        write(tmp_path / "1", 1, "b", lambda t: 1e9 + t * 1.001, steps[1]),
    ]
    merge(str(tmp_path / "out"), files)
    errors = errors_of(tmp_path / "out", 2, steps)[9000:]  # of rank 1, three for each step
    assert max(abs(error) for error in errors) < 1000  # a second's drift, in the first and the last one
    assert max(abs(error) for error in errors[300:-300]) < 250  # the bounds of the records of a second


def test_a_third_machine_may_share_operations_with_the_second_only(tmp_path: Path) -> None:
    steps = steps_of(3, 50, 1000)
    files = [write(tmp_path / f"{rank}", rank, "abc"[rank], lambda t: t, steps[rank], size=3) for rank in range(3)]
    for rank, team in ((0, 1), (2, 2)):  # rank 0 is in team 1 alone, rank 2 in team 2, rank 1 in both by turns
        text = Path(files[rank]).read_text()
        Path(files[rank]).write_text(text.replace('"team": 0', f'"team": {team}'))
    lines = Path(files[1]).read_text().splitlines(keepends=True)
    ends = [index for index, line in enumerate(lines) if '"team": 0' in line]
    for place, index in enumerate(ends):
        lines[index] = lines[index].replace('"team": 0', f'"team": {1 + place % 2}')
    Path(files[1]).write_text("".join(lines))
    said = merge(str(tmp_path / "out"), files)
    assert [line.split(":")[0] for line in said[1:]] == ["hb", "hc"]
    assert all("right to" in line for line in said[1:])
    assert max(abs(error) for error in errors_of(tmp_path / "out", 3, steps)) < 150


def test_without_a_shared_operation_the_date_decides_and_that_is_said(tmp_path: Path) -> None:
    steps = steps_of(2, 5, 1000)
    files = [write(tmp_path / "0", 0, "a", lambda t: t, steps[0]), write(tmp_path / "1", 1, "b", lambda t: t + 1e9, [])]
    said = merge(str(tmp_path / "out"), files)
    assert said[1] == "hb: shares no operation with the other files; its times are as right as the dates of ha and hb"
    parse_timeline(tmp_path / "out")


def test_a_file_whose_end_was_not_written_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    steps = steps_of(2, 10, 1000)
    files = [write(tmp_path / f"{rank}", rank, "a", lambda t: t, steps[rank]) for rank in range(2)]
    whole = Path(files[1]).read_text()
    Path(files[1]).write_text(whole[: len(whole) * 2 // 3])
    said = merge(str(tmp_path / "out"), files)
    assert f"{files[1]}: its end was not written; what was there is in the result" in said
    assert len(begins(parse_timeline(tmp_path / "out"), 1)) > 10


@pytest.mark.parametrize(
    "damaged",
    [
        *(7, None, [], {}, {"ph": 5}, {"ph": "B", "name": "x", "pid": 1}, {"ph": "E", "ts": 3.0}),
        *({"ph": "B", "name": "x", "pid": 1, "ts": "now"}, {"ph": "E", "ts": 3.0, "pid": []}),
        *({"ph": "B", "pid": 1, "ts": 2.0}, {"ph": "E", "ts": 3.0, "pid": 1, "args": {"record": 3}}),
        *({"ph": "E", "ts": 3.0, "pid": 1, "args": 4}, {"ph": "M", "name": "process_name", "pid": 2}),
        {"ph": "i", "name": "x", "pid": 0, "ts": float("inf")},
    ],
)
def test_a_damaged_event_is_left_out(tmp_path: Path, damaged: object) -> None:
    steps = steps_of(2, 10, 1000)
    files = [write(tmp_path / f"{rank}", rank, "a", lambda t: t, steps[rank]) for rank in range(2)]
    merge(str(tmp_path / "well"), files)
    events = json.loads(Path(files[1]).read_text())
    Path(files[1]).write_text(json.dumps([*events[:9], damaged, *events[9:]]))
    said = merge(str(tmp_path / "out"), files)
    assert f"{files[1]}: is damaged; 1 of its events are not in the result" in said
    assert (tmp_path / "out").read_text() == (tmp_path / "well").read_text()


def test_a_file_of_brackets_is_no_timeline(tmp_path: Path) -> None:
    (tmp_path / "deep").write_text("[" * 100_000)
    with pytest.raises(TimelineError, match="deep: is no timeline of a rank of horo"):
        merge(str(tmp_path / "out"), [str(tmp_path / "deep")])


def test_files_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    first = write(tmp_path / "0", 0, "a", lambda t: t, [])
    second = write(tmp_path / "1", 1, "a", lambda t: t, [])
    again = write(tmp_path / "again", 0, "a", lambda t: t, [])
    other = write(tmp_path / "other", 3, "a", lambda t: t, [], size=4)
    (tmp_path / "no").write_text("[]")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    out = str(tmp_path / "out")
    for files, text in (
        ([first, again], f"{first} and {again}: both are of rank 0"),
        ([first, other], f"{first} and {other}: are of two jobs, of 2 and of 4 ranks"),
        ([first, str(tmp_path / "no")], f"{tmp_path / 'no'}: is no timeline of a rank of horo"),
        ([str(tmp_path / "binary")], "it is not text"),
        ([str(tmp_path / "none")], f"{tmp_path / 'none'}: cannot be read: No such file or directory"),
    ):
        with pytest.raises(TimelineError, match=text.replace("(", "\\(")):
            merge(out, files)
        assert not Path(out).exists()
    with pytest.raises(TimelineError, match=f"{second}: is among the files to be merged"):
        merge(second, [first, str(tmp_path / "." / "1")])
    with pytest.raises(TimelineError, match=f"{first}: is the timeline of rank 0; name the file for the result first"):
        merge(first, [second])
    merge(out, [first, second])
    merge(out, [first, second])  # an earlier result
    with pytest.raises(TimelineError, match="cannot be written: No such file or directory"):
        merge(str(tmp_path / "none" / "out"), [first, second])


def test_the_command_merges_and_says_what_is_wrong(tmp_path: Path) -> None:
    first = write(tmp_path / "0", 0, "a", lambda t: t, steps_of(2, 3, 1000)[0])

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return run_python("-X", "importtime", "-m", "horo.timeline", *words)

    done = run("merge", str(tmp_path / "out"), first)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        f"{tmp_path / 'out'}: 1 rank, 18 events",
        "1 of 2 ranks are not among the files",
    ]
    assert not {"torch", "horo.core.context", "numpy"} & {
        line.rpartition("|")[2].strip() for line in done.stderr.splitlines()
    }
    parse_timeline(tmp_path / "out")
    failed = run("merge", str(tmp_path / "out"), str(tmp_path / "none"))
    assert (failed.returncode, failed.stdout) == (1, "")
    assert (
        failed.stderr.splitlines()[-1]
        == f"horo.timeline: {tmp_path / 'none'}: cannot be read: No such file or directory"
    )


def test_nothing_of_a_file_moves_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;title\x07\n\u202e"
    path = tmp_path / "0"
    first = write(path, 0, "a", lambda t: t, steps_of(2, 3, 1000)[0])
    path.write_text(path.read_text().replace('"ha"', json.dumps(evil)).replace('"a"', json.dumps(evil)))
    other = write(tmp_path / "1", 1, "b", lambda t: t, [])
    assert main(["merge", str(tmp_path / "out"), first, other]) == 0
    assert main(["merge", str(tmp_path / "out"), f"none{evil}"]) == 1
    said = capsys.readouterr()
    assert "beside \\x1b]0;title" in said.out or "of \\x1b]0;title" in said.out
    assert "horo.timeline: none\\x1b]0;title" in said.err
    for line in (said.out + said.err).splitlines():
        assert line.isprintable(), line


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


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_growing_file_is_shown_and_left_to_its_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("kind", [UsageError, ResourceError])
def test_the_job_is_left_and_the_error_is_of_its_kind(monkeypatch: pytest.MonkeyPatch, kind: type[HoroError]) -> None:
    """A file may be named wrong; a thread that cannot be started is no mistake of the caller's."""
    monkeypatch.setattr(timeline, "start_timeline", Mock(side_effect=kind("it cannot be")))
    job = Mock()
    with pytest.raises(HoroError, match=r"^HORO_TIMELINE: it cannot be$") as caught:
        timeline.begin_timeline(job, read_config({"HORO_TIMELINE": "t.json"}))
    assert type(caught.value) is kind
    job.close.assert_called_once_with()
