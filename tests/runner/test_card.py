"""The card at the end of a job, with numbers of real ranks, and ``--json-report``, whole or not at all."""

from __future__ import annotations

import json
import signal
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from jobs import TORCH_S, Flags, Hororun
from trace_events import arrows_of, parse_timeline

from horo.runner.agent.rank_reports import Note, NoteReader
from horo.runner.agent.rank_summary import NAMES_MAX, RankSummary, read_summary
from horo.runner.cli import main
from horo.runner.job.card import card, facts_of
from horo.runner.job.json_report import write_report
from horo.runner.job.report import Ending
from horo.timeline.merging import together
from horo.timeline.steps import steps_of

MS = 1_000_000
HEALTHY = RankSummary(
    steps=101,
    size=4,
    measured=100,
    ns=8840 * MS,
    waiting=600 * MS,
    moving=330 * MS,
    loading=90 * MS,
    bytes=100 * 46871347,
    tensors=1400,
    batches=200,
    peak=1_900 << 20,
    cores=8,
    ranks_here=4,
    on_cpu=1,
    via="shared memory",
)


def waits(*by_step: int, loaded: int = 0) -> tuple[tuple[int, int, int], ...]:
    """Samples of steps in which a rank has waited so many milliseconds."""
    return tuple((number, 1000 * each, 1000 * loaded) for number, each in enumerate(by_step, 2))


def in_turn(rank: int) -> RankSummary:
    """A rank of a healthy job, in which each is last in turn."""
    return replace(HEALTHY, samples=waits(*(0 if step % 4 == rank else 6 for step in range(100))))


def ends(*ranks: RankSummary | None, **how: Any) -> list[Ending]:
    return [Ending(rank, "localhost", note=Note(summary=each), **how) for rank, each in enumerate(ranks)]


def facts(endings: list[Ending], *, failed: bool = False, word: str = "rank") -> dict[str, Any]:
    return facts_of(endings, failed=failed, word=word)


def lines(endings: list[Ending], *, seconds: float = 12.0, code: int = 0, signal: str = "") -> list[str]:
    return card(facts(endings, failed=code != 0), seconds=seconds, code=code, signal=signal)


def test_a_healthy_job_has_a_card_without_advice() -> None:
    endings = ends(*map(in_turn, range(4)))
    endings[3] = replace(endings[3], note=Note(summary=replace(in_turn(3), peak=2 << 30)))
    assert lines(endings, seconds=724.2) == [
        "done in 12m 04s: 4 ranks on 1 host, 101 steps, 11.3 steps/s, exit 0",
        "  a step          88.4 ms: computing 79.1 (89 %), waiting for other ranks 6.0 (7 %), moving data 3.3 (4 %)",
        "  traffic         44.7 MiB per step and rank, 14 tensors in 2 batches, shared memory",
        "  memory          1.9 to 2.0 GiB per rank at most",
    ]


@pytest.mark.parametrize("ranks", [ends(None, None), ends(RankSummary(size=2), RankSummary(size=2))])
def test_what_was_not_measured_is_left_out(ranks: list[Ending]) -> None:
    assert lines(ranks, seconds=0.44) == ["done in 0.4 s: 2 ranks on 1 host, exit 0"]


def test_a_job_of_one_rank_waits_for_nobody() -> None:
    alone = replace(HEALTHY, size=1, waiting=0, moving=0, bytes=0, tensors=0, batches=0, via="", peak=0)
    assert lines(ends(alone), seconds=3661) == [
        "done in 1h 01m 01s: 1 rank on 1 host, 101 steps, 11.3 steps/s, exit 0",
        "  a step          88.4 ms: computing 88.4 (100 %)",
    ]


@pytest.mark.parametrize(
    ("loaded", "told"), [(0, ""), (2, ""), (5, ", 5.0 of it waiting for its DataLoader (data loading?)")]
)
def test_the_slowest_rank_is_named_if_it_costs_time_and_its_loader_if_that_is_why(loaded: int, told: str) -> None:
    others = replace(HEALTHY, samples=waits(*[6] * 100))
    slow = replace(HEALTHY, samples=waits(*(1 if step < 71 else 20 for step in range(100)), loaded=loaded))
    line = f"  slowest rank    2: last in 71 % of steps, 5.0 ms behind at the median{told}"
    assert line in lines(ends(others, others, slow, others))


def test_a_rank_that_is_last_by_little_or_by_chance_or_in_few_steps_is_not_named() -> None:
    others = replace(HEALTHY, size=2, samples=waits(*[6] * 100))
    little = replace(others, samples=waits(*[2] * 100))  # 4 of 88 ms
    chance = replace(others, samples=waits(*(0 if step % 3 else 20 for step in range(100))))
    few = replace(others, samples=waits(*[0] * 9))
    luck = replace(others, samples=waits(*[0] * 8, 20, 20))  # as heads at 8 of 10 coins
    elsewhere = replace(others, samples=waits(*[0] * 100), size=1)  # of another job
    for slow in (little, chance, few, luck, elsewhere):
        assert facts(ends(others, slow))["slowest"] is None


def test_notes_are_of_slow_loaders_crowded_cores_and_unused_parameters() -> None:
    slow = [replace(in_turn(rank), loading=2652 * MS) for rank in range(4)]
    advice = "every rank waits for its DataLoader for 30 % of a step: more workers (num_workers=) would help"
    assert lines(ends(*slow))[-1] == f"  notes           {advice}"
    assert facts(ends(*slow[:3], in_turn(3)))["notes"] == []
    assert facts(ends(*slow[:3], None), failed=True)["notes"] == []  # who knows
    crowded = [replace(in_turn(rank), cores=2) for rank in range(4)]
    assert facts(ends(*crowded))["notes"] == ["4 ranks on 2 cores: -np 2 would be faster"]
    assert facts(ends(*(replace(each, on_cpu=0) for each in crowded)))["notes"] == []
    assert facts(ends(crowded[0], None, None, None), failed=True)["notes"] == []  # those of other hosts are not known
    some = [replace(in_turn(rank), unused=("b", "a", "c", "d")[: 4 - rank]) for rank in range(3)]
    assert facts(ends(*some))["notes"] == ["2 parameters had no gradient in the last step (a, b)"]
    four = [replace(some[0])] * 2
    assert facts(ends(*four))["notes"] == ["4 parameters had no gradient in the last step (a, b, c, ...)"]
    assert facts(ends(*four, None))["notes"] == []  # who knows
    many = replace(HEALTHY, unused=tuple(f"p{number:02}" for number in range(NAMES_MAX)))
    assert facts(ends(many))["notes"] == [
        f"at least {NAMES_MAX} parameters had no gradient in the last step (p00, p01, p02, ...)"
    ]


def test_a_job_that_failed_has_the_step_and_line_of_each_rank_that_told_it() -> None:
    waiting = replace(HEALTHY, steps=30, within=31)
    failed = [replace(each, code=1) for each in ends(waiting, None, waiting, None)]
    failed[0] = replace(failed[0], note=Note(summary=waiting, where="train.py, line 32"))
    failed[2] = replace(failed[2], note=Note(summary=waiting, where="train.py, line 32"))
    failed[1] = Ending(1, "localhost", note=Note(summary=replace(HEALTHY, steps=30)))
    shown = lines(failed, code=1)
    assert shown[0] == "failed after 12.0 s: 4 ranks on 1 host, 30 steps, 11.3 steps/s, exit 1"
    assert shown[1] == (
        "  ranks           ranks 0,2 were in step 31, train.py, line 32; rank 1 ended its script after step 30"
    )
    assert shown[-1] == (
        "  notes           rank 1 ran short of data: give all ranks equally many batches, or end with hvd.join()"
    )
    assert lines(failed, code=130, signal="SIGINT")[0].startswith("ended by SIGINT after 12.0 s: ")


def test_who_has_not_chosen_its_end_ran_not_short_of_data() -> None:
    survivor, early = replace(HEALTHY, steps=30, within=31), replace(HEALTHY, steps=30)
    failed = Ending(1, "localhost", code=1, note=Note(summary=early))
    caught = Ending(0, "localhost", note=Note(summary=survivor))
    assert facts([caught, failed], failed=True)["notes"] == []  # the error of its step, and saved
    interrupted = Ending(1, "localhost", code=130, note=Note(summary=survivor))
    asked = Ending(0, "localhost", asked=True, note=Note(summary=early))
    assert facts([asked, interrupted], failed=True)["notes"] == []


@pytest.mark.parametrize("failed", [False, True])
def test_a_worker_that_came_later_ran_not_short_of_data(failed: bool) -> None:
    workers = ends(HEALTHY, None, replace(HEALTHY, steps=50))
    workers[1] = replace(workers[1], code=1)
    told = facts(workers, failed=failed, word="worker")
    assert told["notes"] == []
    assert told["ends"] == (
        "worker 0 ended its script after step 101; worker 2 ended its script after step 50" if failed else ""
    )


def test_the_parts_of_a_step_are_not_negative() -> None:
    step = facts(ends(replace(HEALTHY, waiting=9000 * MS), HEALTHY))["step"]
    assert step["computing"] >= 0


def written(summary: RankSummary) -> dict[str, Any]:
    """As ``StepMeter`` hands it over."""
    columns = [list(column) for column in zip(*summary.samples, strict=True)] or [[], [], []]
    return json.loads(json.dumps({**asdict(summary), "samples": columns}))  # type: ignore[no-any-return]


def test_a_summary_is_read_as_it_was_written_and_those_of_later_jobs_are_added() -> None:
    summary = replace(in_turn(1), unused=("a",), within=102)
    assert read_summary(written(summary)) == summary
    reader = NoteReader()
    for _ in range(2):
        reader.feed(json.dumps({"summary": written(summary)}).encode() + b"\n")
    both = reader.note.summary
    assert both is not None
    assert (both.steps, both.measured, both.ns, both.samples) == (202, 200, 2 * summary.ns, summary.samples)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ns": -1},
        {"ns": True},
        {"ns": 1.5},
        {"ns": 1 << 62},
        {"ns": None},
        {"samples": [[1], [2]]},
        {"samples": [[1], [2], []]},
        {"samples": [[1], [2], ["x"]]},
        {"samples": [list(range(5000))] * 3},
        {"samples": 3},
    ],
)
def test_what_is_no_summary_is_passed_over(wrong: dict[str, Any]) -> None:
    assert read_summary({**written(HEALTHY), **wrong}) is None
    assert read_summary([wrong]) is None


TRAIN = """
import sys, time
import torch
import horo.torch as hvd

hvd.init()
torch.manual_seed(0)
assert hvd.stats().steps == hvd.stats().total.seconds == hvd.stats().last.bytes == 0
model = torch.nn.Linear(8, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 12 if sys.argv[1] == "short" and hvd.rank() == 1 else 20

    def __getitem__(self, index):
        if sys.argv[1] == "loader" and hvd.rank() == 1:
            time.sleep(0.2)
        return torch.ones(8)


for step, batch in enumerate(torch.utils.data.DataLoader(Data()), 1):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    stats = hvd.stats()
    assert (stats.steps, stats.total.steps) == (step, step - 1)
    assert stats.last.bytes >= 72 * (step > 1)
    assert step > 10 or stats.slowest is None
    assert 0 <= stats.last.waiting <= stats.last.seconds and stats.peak_memory > 0

if sys.argv[1] == "loader":
    assert stats.slowest.rank == 1 and stats.slowest.loading_s >= stats.slowest.behind_s / 2, stats.slowest
"""


def test_a_slow_loader_on_one_rank_is_on_the_card_and_in_the_report(hororun: Hororun, tmp_path: Path) -> None:
    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(TRAIN)
    traced = ("--timeline-merge", str(tmp_path / "all.json"))
    words = ("-np", "2", "--summary", "--json-report", str(report), *traced, "--", str(script), "loader")
    done = hororun.start(*words).finish(3 * TORCH_S)
    assert done.returncode == 0, done.stderr
    training = json.loads(report.read_text())["training"]
    slowest, step = training["slowest"], training["step"]
    assert slowest["rank"] == 1 and slowest["share"] >= 0.75 and slowest["loading_s"] >= slowest["behind_s"] / 2
    assert training["steps"] == 20 and step["computing"] + step["waiting"] + step["moving"] == pytest.approx(
        step["seconds"]
    )
    assert "hororun: done in " in done.stderr and "(data loading?)" in done.stderr
    late = Counter(begin for begin, _ in arrows_of(parse_timeline(tmp_path / "all.json")))
    assert late[1] >= 15 > late[0]
    seen = steps_of(together([str(tmp_path / "all.json")])[0]).facts
    assert (seen["slowest"]["rank"], seen["steps"]) == (1, 20)
    assert seen["step"]["seconds"] == pytest.approx(step["seconds"], rel=0.1)


def test_a_rank_short_of_data_is_on_the_card_of_the_job_that_fails_of_it(hororun: Hororun, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    words = ("-np", "2", "--", str(script), "short")
    done = hororun.start(*words, environment={"HORO_SUMMARY": "1"}).finish(3 * TORCH_S)
    assert done.returncode == 1, done.stderr
    line = next(each for each in done.stderr.splitlines() if each.startswith("  ranks "))
    assert line.split(None, 1)[1].startswith("rank 0 was in step 13, train.py, line ")
    assert line.endswith("; rank 1 ended its script after step 12")
    assert "  notes           rank 1 ran short of data: " in done.stderr


def read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    assert value["format"] == 1 and 0 <= value["seconds"] < 300
    assert not list(path.parent.glob("*.new"))
    return value


def test_a_job_that_ends_well(hororun: Hororun, where: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text("of an earlier job")
    done = hororun.run("-np", "2", "--json-report", str(file), "--", "true", where=where)
    assert done.returncode == 0, done.stderr
    report = read(file)
    assert report["exit"] == {"code": 0, "signal": None, "reasons": []}
    assert report["command"] == ["true"] and report["cause"] is None
    assert [(each["rank"], each["code"]) for each in sorted(report["ranks"], key=lambda each: each["rank"])] == [
        (0, 0),
        (1, 0),
    ]


def test_the_rank_that_failed_first_is_the_cause(hororun: Hororun, where: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    script = "test $HOROVOD_RANK = 1 && kill -9 $$; exec sleep 300"
    words = ("-np", "2", "--failure-seconds", "0", "--json-report", str(file), "--", "sh", "-c", script)
    assert hororun.run(*words, where=where).returncode == 137
    report = read(file)
    host = "localhost" if where.startswith("localhost") else "one"
    assert report["exit"] == {"code": 137, "signal": None, "reasons": []}
    assert report["cause"] == {"rank": 1, "host": host, "how": "was killed by SIGKILL"}
    first, second = report["ranks"]
    assert (first["rank"], first["code"], first["signal"], first["asked"]) == (1, None, "SIGKILL", False)
    assert (second["rank"], second["signal"], second["asked"]) == (0, "SIGTERM", True)


@pytest.mark.parametrize("count", [1, 2])
def test_ctrl_c_leaves_a_whole_report(hororun: Hororun, flags: Flags, tmp_path: Path, count: int) -> None:
    file = tmp_path / "report.json"
    script = f"trap '' INT TERM; : > {flags.folder}/up; while :; do sleep 0.1; done"
    words = ("-np", "1", "--grace-seconds", "0.2", "--json-report", str(file), "--", "sh", "-c", script)
    job = hororun.start(*words)
    flags.wait(["up"])
    for _ in range(count):
        job.process.send_signal(signal.SIGINT)
    assert job.finish().returncode == 130
    report = read(file)
    assert report["exit"] == {"code": 130, "signal": "SIGINT", "reasons": []}
    assert report["cause"] is None and report["ranks"][0]["signal"] == "SIGKILL"


def test_a_rank_that_ctrl_c_ends_with_an_exception_is_no_cause(hororun: Hororun, flags: Flags, tmp_path: Path) -> None:
    file, script = tmp_path / "report.json", tmp_path / "train.py"
    script.write_text(
        "import time\nfrom horo.bootstrap import job\njob.start()\n"
        f"open('{flags.folder}/up', 'w').close()\ntime.sleep(600)\n"
    )
    job = hororun.start("-np", "1", "--failure-seconds", "0", "--json-report", str(file), "--", str(script))
    flags.wait(["up"])
    assert job.end_by(signal.SIGINT).returncode == 130
    report = read(file)
    assert report["ranks"][0]["asked"] and report["cause"] is None


def test_a_job_that_cannot_start_has_the_reason(hororun: Hororun, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = hororun.run("-np", "1", "--json-report", str(file), "--", "./no-such-program")
    report = read(file)
    assert report["exit"]["code"] == done.returncode == 127
    assert f"hororun: {report['exit']['reasons'][0]}" in done.stderr
    assert report["ranks"] == []


def test_a_report_is_not_taken_for_that_of_a_later_job_that_fails_before_it_starts(
    hororun: Hororun, tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    file.write_text("{}")
    done = hororun.run("-np", "2", "--json-report", str(file), "--", "touch", "ran", cwd=tmp_path, where="localhost:1")
    assert done.returncode != 0 and not (tmp_path / "ran").exists()
    assert not file.exists()


def test_an_elastic_job_without_a_worker_has_all_values(hororun: Hororun, tmp_path: Path) -> None:
    hororun.remote_shell, file = "false", tmp_path / "report.json"
    words = ("-np", "1", "--min-np", "1", "--start-timeout", "1", "--elastic-timeout", "1")
    hororun.run(*words, "--json-report", str(file), "--", "true", where="two:1")
    report = read(file)
    assert report["exit"]["code"] == 69
    assert (report["generations"], report["stood_still_s"], report["steps_lost"]) == ([], 0.0, None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (".", "is a folder"),
        ("new/", "is a folder"),
        ("no/report", "there is no folder"),
        ("file/report", "there is no folder"),
        ("link", "is a symbolic link"),
        ("train.py", "is a script, which the result would replace; name a file for the result before it"),
        (256 * "n", "File name too long"),
        (250 * "n", "File name too long"),  # that of the file beside it
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_job(
    tmp_path: Path, name: str, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "file").touch()
    (tmp_path / "train.py").write_text("print()")
    path = f"{tmp_path}/{name}"
    assert main(["-np", "1", "-H", "localhost:1", "--json-report", path, "--", "touch", "ran"]) == 2
    assert f"hororun: --json-report {path}: {words}" in capfd.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "train.py").read_text() == "print()"


def test_a_report_that_cannot_be_written_is_a_sentence_and_leaves_the_one_before(tmp_path: Path) -> None:
    said: list[str] = []
    file = tmp_path / "report.json"
    write_report(str(file), {"a": 1}, said.append)
    assert json.loads(file.read_text()) == {"a": 1}
    file.rename(tmp_path / "other")
    file.mkdir()
    write_report(str(file), {"a": 2}, said.append)
    assert said == [f"--json-report {file}: Is a directory"]
    write_report(f"{tmp_path}/other/report", {"a": 3}, said.append)
    assert said[1:] == [f"--json-report {tmp_path}/other/report: Not a directory"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "report.json"]
