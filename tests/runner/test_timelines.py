"""Timelines that hororun is asked for, as a user of Horovod asks for them; and who was slow, by timelines."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from jobs import PLAIN_RANK, Hororun, run_python
from parsing import parsed
from trace_events import arrows_of, parse_timeline, rows_of, write

from horo import command
from horo.runner.cli import parse
from horo.runner.config import JobError, TimelineMerge
from horo.runner.job.merge_timelines import run_and_merge
from horo.timeline import merge
from horo.timeline.__main__ import main
from horo.timeline.merging import together
from horo.timeline.steps import steps_of

STEPS = 40
TRAIN = f"""{PLAIN_RANK}
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


def test_options_become_variables_of_the_ranks_and_marks_need_a_timeline() -> None:
    words = ("--timeline-filename", "t.json")
    assert exports_of(*words) == {"HORO_TIMELINE": "t.json"}
    assert exports_of(*words, "--timeline-mark-cycles") == {"HORO_TIMELINE": "t.json", "HORO_TIMELINE_MARK_CYCLES": "1"}
    assert exports_of("--no-timeline-mark-cycles") == {"HORO_TIMELINE_MARK_CYCLES": "0"}
    marks = {"HORO_TIMELINE_MARK_CYCLES": "1"}
    assert exports_of("--timeline-mark-cycles", environment={"HOROVOD_TIMELINE": "t.json"}) == marks
    assert exports_of("--timeline-mark-cycles", "-x", "HORO_TIMELINE=t") == {"HORO_TIMELINE": "t", **marks}
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


def files_of(
    folder: Path, late_us: Callable[[int, int], float], *, ranks: int = 3, name: str = "gradient.w"
) -> list[str]:
    """Of steps of 10 ms: a rank submits so much later, all begin 0.1 ms after the last one, and end 1 ms after that."""
    steps: list[list[Sequence[float]]] = [[] for _ in range(ranks)]
    for step in range(STEPS):
        begin = 1000.0 + 10_000 * step
        submitted = [begin + late_us(rank, step) for rank in range(ranks)]
        for rank in range(ranks):
            steps[rank].append((submitted[rank], max(submitted) + 100, max(submitted) + 1100))
    return [
        write(folder / f"{rank}", rank, "a", lambda t: t + 7e9, steps[rank], size=ranks, name=name)
        for rank in range(ranks)
    ]


def slow(rank: int, _step: int) -> float:
    return 3000 if rank == 1 else 0


def healthy(rank: int, step: int) -> float:
    return 300 if rank == step % 3 else 0


CARD = [
    "3 ranks on 1 host, 40 steps, 100 steps/s",
    "  a step          10.0 ms: computing 6.9 (69 %), waiting for other ranks 2.1 (21 %), moving data 1.0 (10 %)",
    "  slowest rank    1: last in 100 % of steps, 3.0 ms behind at the median",
]


def card_of(capsys: pytest.CaptureFixture[str], *paths: str) -> list[str]:
    assert main(["summary", *paths]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_slow_rank_is_in_the_summary_with_arrows_and_a_healthy_job_names_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = files_of(tmp_path, slow)
    out = str(tmp_path / "all.json")
    assert merge(out, files) == [f"{out}: 3 ranks, 720 events, 80 arrows to ranks that waited: 80 for rank 1"]
    events = parse_timeline(Path(out))
    assert sorted(arrows_of(events)) == [(1, 0)] * STEPS + [(1, 2)] * STEPS
    assert {event["args"]["waited_ms"] for event in events if event["ph"] == "s"} == {3.0}
    assert card_of(capsys, out)[:3] == [f"{out}: {CARD[0]}", *CARD[1:]]
    assert main(["summary", out, files[0]]) == 1
    assert capsys.readouterr().err == f"horo.timeline: {out}: has several ranks already: name it alone\n"
    assert card_of(capsys, *files)[:3] == [f"timelines: {CARD[0]}", *CARD[1:]]
    files = files_of(tmp_path, healthy)
    out = str(tmp_path / "all.json")
    assert merge(out, files) == [f"{out}: 3 ranks, 720 events"]
    assert arrows_of(parse_timeline(Path(out))) == []
    first, step, traffic = card_of(capsys, out)
    assert first == f"{out}: {CARD[0]}"
    assert step.endswith("ms: computing 8.7 (87 %), waiting for other ranks 0.3 (3 %), moving data 1.0 (10 %)")
    assert traffic == "  traffic         0 bytes per step and rank, 1 tensor in 1 batch, TCP"


def test_the_ticks_of_rank_0_name_the_slow_rank_where_the_others_wrote_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for late_us, named in ((slow, ["rank    1: last in 100 % of steps, 3.0 ms behind at the median"]), (healthy, [])):
        (path, *_) = files_of(tmp_path, late_us)
        events = []
        for event in json.loads(Path(path).read_text()):
            events.append(event)
            if event.get("name") == "NEGOTIATE_ALLREDUCE":
                step = sum(each.get("name") == event["name"] for each in events) - 1
                begin = event["ts"] - late_us(0, step)
                ticks = [(begin + late_us(rank, step), str(rank)) for rank in range(3)]
                events += [{**event, "ph": "X", "dur": 0, "name": rank, "ts": at} for at, rank in sorted(ticks)]
        Path(path).write_text(json.dumps(events))
        lines = card_of(capsys, path)
        assert [line.partition("slowest ")[2] for line in lines if "slowest" in line] == named
        assert lines[-1] == "  notes           2 of 3 ranks are not in it"


def test_without_all_ranks_or_without_names_the_slowest_is_unknown_and_that_is_in_the_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = files_of(tmp_path, slow)
    lines = card_of(capsys, files[0])
    assert lines[0].endswith(CARD[0])
    assert lines[-1] == "  notes           2 of 3 ranks are not in it: the slowest is not known"
    assert not any("slowest rank" in line for line in lines)
    lines = card_of(capsys, *files_of(tmp_path, slow, name="allreduce.noname"))
    assert lines == [
        "timelines: 3 ranks on 1 host",
        "  notes           no operation with a name comes again, by which steps could be known",
    ]


def test_gradients_count_as_steps_where_another_tensor_comes_more_often(tmp_path: Path) -> None:
    timelines = files_of(tmp_path, slow, ranks=1)
    often = json.loads(Path(timelines[0]).read_text())
    more = [
        {**event, "pid": 2, "ts": event["ts"] + 5000 + shift, "args": {**event.get("args", {}), "record": number}}
        for number, shift in enumerate((0.0, 2000.0))
        for event in often
        if event["ph"] in "BE"
    ]
    for number, event in enumerate(more):
        event["args"] = {"team": 0, "record": 10_000 + number} if event["args"].get("team") == 0 else {}
    label = {"name": "process_name", "ph": "M", "pid": 2, "tid": 0, "args": {"name": "loss"}}
    rest = sorted((event for event in [*often[2:], *more]), key=lambda event: event["ts"])
    Path(timelines[0]).write_text(json.dumps([*often[:2], label, *rest]))
    course = steps_of(together(timelines)[0])
    assert course.facts["steps"] == STEPS
    assert course.step_s == pytest.approx(0.01)


def test_of_a_merged_file_that_is_cut_the_summary_has_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "all.json"
    merge(str(out), files_of(tmp_path, slow))
    out.write_bytes(out.read_bytes()[: out.stat().st_size // 2])
    lines = card_of(capsys, str(out))
    assert "slowest rank    1: last in 100 % of steps" in lines[2]
    assert lines[-1] == f"{out}: its end was not written"


@pytest.mark.parametrize("content", ["", "5", "[]", "[1, 2]", '{"a": 1}', '[{"name": "process_name", "ph": "M"}]'])
def test_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    (tmp_path / "x").write_text(content)
    assert main(["summary", str(tmp_path / "x")]) == 1
    assert capsys.readouterr().err == f"horo.timeline: {tmp_path}/x: is no timeline of horo\n"


def test_events_of_a_merged_file_may_be_anything(tmp_path: Path) -> None:
    out = tmp_path / "all.json"
    merge(str(out), files_of(tmp_path, slow))
    events = json.loads(out.read_text())
    for member in ("pid", "tid", "ts", "name", "args", "ph"):
        for wrong in (None, -1, 1e300, [], {}, "x"):
            changed = [{**event, member: wrong} if number % 3 else event for number, event in enumerate(events)]
            out.write_text(json.dumps(changed))
            assert main(["summary", str(out)]) in (0, 1)


def test_horo_has_a_word_for_each_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("[]")
    done: subprocess.CompletedProcess[str] = run_python("-m", "horo.command", "trace", "summary", str(tmp_path / "x"))
    assert (done.returncode, done.stderr) == (1, f"horo.timeline: {tmp_path}/x: is no timeline of horo\n")
    assert command.main(["--help"]) == 0
    assert "trace summary FILE" in capsys.readouterr().out
    assert command.main([]) == 2
    assert capsys.readouterr().err.startswith("usage: horo ")
    assert command.main(["mend"]) == 2
    assert capsys.readouterr().err.startswith("horo: 'mend' is no command\n")
