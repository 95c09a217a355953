"""Timelines that hororun is asked for, as a user of Horovod asks for them."""

import json
import os
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from jobs import Hororun
from parsing import parsed
from trace_events import parse_timeline, rows_of

from horo.runner.cli import parse
from horo.runner.config import JobError, TimelineMerge
from horo.runner.job.merge_timelines import run_and_merge

STEPS = 40
TRAIN = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parent.parent)!r})
from plain_rank import Rank

rank = Rank()
rank.start()
for step in range({STEPS}):
    rank.allreduce(f"allreduce.t{{step % 4}}", 100_000)
rank.close()
"""


def exports_of(*words: str, environment: dict[str, str] | None = None) -> dict[str, str]:
    job = parsed(["-np", "2", *words, "cmd"], environment=environment or {})
    assert job.passed_over == ()
    return job.exports


def test_options_become_variables_of_the_ranks() -> None:
    words = ("--timeline-filename", "t.json")
    assert exports_of(*words) == {"HORO_TIMELINE": "t.json"}
    assert exports_of(*words, "--timeline-mark-cycles") == {"HORO_TIMELINE": "t.json", "HORO_TIMELINE_MARK_CYCLES": "1"}
    assert exports_of("--no-timeline-mark-cycles") == {"HORO_TIMELINE_MARK_CYCLES": "0"}
    marks = {"HORO_TIMELINE_MARK_CYCLES": "1"}
    assert exports_of("--timeline-mark-cycles", environment={"HOROVOD_TIMELINE": "t.json"}) == marks
    assert exports_of("--timeline-mark-cycles", "-x", "HORO_TIMELINE=t") == {"HORO_TIMELINE": "t", **marks}


def test_marks_without_a_timeline_are_refused_or_in_a_script_of_horovods_passed_over() -> None:
    with pytest.raises(JobError, match="--timeline-mark-cycles has no effect: no --timeline-filename asks for a time"):
        exports_of("--timeline-mark-cycles")
    job = parsed(["-np", "2", "--timeline-mark-cycles", "cmd"], for_horovod=True, environment={})
    assert job.passed_over == ("--timeline-mark-cycles does nothing here: no --timeline-filename asks for a timeline",)
    assert "HORO_TIMELINE_MARK_CYCLES" not in job.exports  # else the ranks would say it once more


def test_rank_0_writes_the_file_where_hororun_was_called(hororun: Hororun, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    words = ["-np", "2", "--timeline-filename", "t.json", "--timeline-mark-cycles", "train.py"]
    done = hororun.start(*words, cwd=tmp_path).finish()
    assert (done.returncode, done.stderr) == (0, "")
    events = parse_timeline(tmp_path / "t.json")
    assert rows_of(events)["allreduce.t3"] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "  SHM_ALLREDUCE"] * (STEPS // 4)
    assert sum(event.get("name") == "CYCLE_START" for event in events) >= STEPS
    assert [path.name for path in tmp_path.iterdir() if "json" in path.name] == ["t.json"]


@pytest.mark.parametrize(("where", "code"), [("localhost:2", 7), ("one:1,two:1", 0)])
def test_the_timelines_of_all_ranks_are_merged_at_the_end(
    hororun: Hororun, where: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(f"{TRAIN}\nraise SystemExit({code})\n")
    words = ["-np", "2", "--timeline-filename", "t-{rank}.json", "--timeline-merge", "all.json", "train.py"]
    done = hororun.start(*words, where=where, cwd=tmp_path).finish()
    assert done.returncode == code
    (said,) = (line for line in done.stderr.splitlines() if "all.json" in line)
    assert re.fullmatch(r"hororun: all\.json: 2 ranks, \d+ events(, \d+ arrows to ranks that waited: .*)?", said)
    assert code or done.stderr.count("\n") == 1
    events = parse_timeline(tmp_path / "all.json")
    assert sum(each["ph"] == "B" and each["name"] == "SHM_ALLREDUCE" for each in events) == 2 * STEPS


ENDS = {
    "one is killed": (-9, "if rank.job.rank == 0:\n    os.kill(os.getpid(), 9)\nrank.allreduce('late')"),
    "one raises": (1, "if rank.job.rank == 0:\n    raise ValueError\nrank.allreduce('late')"),
    "all leave": (7, "sys.exit(7)"),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_files_are_there_however_the_job_ends(hororun: Hororun, tmp_path: Path, end: str) -> None:
    code, script = ENDS[end]
    wait = (
        "import os, time\nfrom horo.timeline.recording import rows_of\n"
        f"while os.stat(rows_of(f't-{{rank.job.rank}}.json')).st_size < {STEPS} * 72:\n    time.sleep(0.001)\n"
        "rank.allreduce('all are here')\n"
    )
    (tmp_path / "train.py").write_text(TRAIN.replace("rank.close()\n", wait + script))
    words = ["-np", "2", "--timeline-filename", "t-{rank}.json", "train.py"]
    done = hororun.start(*words, cwd=tmp_path).finish()
    assert done.returncode == (code if code > 0 else 128 - code)
    assert sorted(path.name for path in tmp_path.iterdir() if "json" in path.name) == ["t-0.json", "t-1.json"]
    for rank in range(2):
        rows = rows_of(parse_timeline(tmp_path / f"t-{rank}.json", is_ended=False))
        assert rows["allreduce.t1"][:3] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "  SHM_ALLREDUCE"]


def a_timeline(path: Path, rank: int) -> None:
    head = {"rank": rank, "size": 4, "host": "h", "clock": "c", "monotonic_ns": 0}
    head["start_time_since_epoch_in_micros"] = 10**15
    path.write_text(json.dumps([{"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": head}]))


def test_what_is_on_other_hosts_or_of_an_earlier_job_is_named(tmp_path: Path) -> None:
    wanted = TimelineMerge(str(tmp_path / "all.json"), str(tmp_path / "t-{rank}.json"))
    for rank in (1, 2):
        a_timeline(tmp_path / f"t-{rank}.json", rank)
    said: list[str] = []

    def run() -> int:
        for rank in (0, 2):
            (tmp_path / f"t-{rank}.json").unlink(missing_ok=True)
            a_timeline(tmp_path / f"t-{rank}.json", rank)
        return 3

    assert run_and_merge(wanted, 4, run, said.append) == 3
    assert said[:2] == [f"{tmp_path}/all.json: 2 ranks, 0 events", "2 of 4 ranks are not among the files"]
    assert said[2] == (
        f"--timeline-merge: ranks 1,3 have not written {tmp_path}/t-{{rank}}.json in the files of this host: where a "
        "rank has called init() on a host with files of its own, copy its timeline from there, then "
        f"python -m horo.timeline merge {tmp_path}/all.json {tmp_path}/t-*.json"
    )
    (tmp_path / "all.json").unlink()
    said.clear()
    assert run_and_merge(wanted, 1, lambda: 0, said.append) == 0  # no timeline at all
    assert said[0].startswith("--timeline-merge: rank 0 has not written ")
    assert not (tmp_path / "all.json").exists()


def test_a_merge_that_fails_or_is_interrupted_leaves_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = TimelineMerge(str(tmp_path / "all.json"), str(tmp_path / "t-{rank}.json"))
    said: list[str] = []

    def run() -> int:
        (tmp_path / "t-0.json").write_text("[]" + " " * len(said))
        return 5

    assert run_and_merge(wanted, 1, run, said.append) == 5
    assert said == [f"--timeline-merge: {tmp_path}/t-0.json: is no timeline of a rank of horo"]

    for error, told in ((KeyError("ts"), "failed (KeyError: 'ts')"), (KeyboardInterrupt(), "interrupted")):
        monkeypatch.setattr("horo.runner.job.merge_timelines.merge", Mock(side_effect=error))
        assert run_and_merge(wanted, 1, run, said.append) == 5
        assert said.pop().startswith(f"--timeline-merge: {told}; later: python -m horo.timeline merge ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--timeline-filename t.json", "HORO_TIMELINE=t.json is of rank 0; name one for each rank, like --timeline-f"),
        ("-x HOROVOD_TIMELINE=t.json", "HOROVOD_TIMELINE=t.json is of rank 0; name one"),
        ("-x HORO_TIMELINE=DYNAMIC", "HORO_TIMELINE=DYNAMIC is of rank 0; name one"),
    ],
)
def test_a_merge_of_one_rank_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(JobError) as caught:
        parse(["-np", "2", "--timeline-merge", "all.json", *words.split(), "cmd"], environment={})
    assert str(caught.value).startswith(f"--timeline-merge all.json has no effect: {sentence}")
    job = parsed(["-np", "2", "--timeline-merge", "a", "cmd"], environment={"HOROVOD_TIMELINE": "t{rank}"})
    assert job.timelines == TimelineMerge("a", "t{rank}")


def test_a_merge_alone_has_each_rank_write_a_file_beside_the_result() -> None:
    job = parsed(["-np", "2", "--timeline-merge", "d/all.json", "cmd"], environment={"HORO_TIMELINE": ""})
    assert job.timelines == TimelineMerge("d/all.json", "d/all-{rank}.json")
    assert job.exports == {"HORO_TIMELINE": "d/all-{rank}.json"}


def test_a_result_that_cannot_be_written_is_refused_before_the_job(tmp_path: Path) -> None:
    pattern = str(tmp_path / "t-{rank}.json")
    (tmp_path / "link").symlink_to(tmp_path / "all.json")
    for out, reason in (
        (tmp_path / "none" / "all.json", f"there is no folder '{tmp_path}/none'"),
        (tmp_path, "is a folder; name a file for the result"),
        (tmp_path / "t-1.json", "is the timeline of one rank; name another file for the result"),
        (tmp_path / "link", "is a symbolic link; name another file for the result"),
        (Path(os.devnull), "is no regular file; name another file for the result"),
    ):
        with pytest.raises(JobError) as caught:
            run_and_merge(TimelineMerge(str(out), pattern), 2, lambda: pytest.fail("it ran"), lambda _: None)
        assert str(caught.value) == f"--timeline-merge {out}: {reason}"
