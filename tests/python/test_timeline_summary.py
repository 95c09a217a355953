"""Who was slow, by timelines: arrows from the last rank to those that waited, and the card that is made of a file."""

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from jobs import run_python
from trace_events import arrows_of, parse_timeline
from written_timelines import write

from horo import command
from horo.timeline import merge
from horo.timeline.__main__ import main
from horo.timeline.merging import together
from horo.timeline.steps import steps_of

STEPS = 40


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


def test_a_slow_rank_is_in_the_summary_and_arrows_lead_from_it(
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


def test_a_healthy_job_names_no_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
