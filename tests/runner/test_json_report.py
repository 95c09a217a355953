"""``--json-report``: the course of a job in a file, whole or not at all."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from jobs import Flags, Hororun

from horo.runner.cli import main
from horo.runner.job.json_report import write_report


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
    job.process.send_signal(signal.SIGINT)
    assert job.finish().returncode == 130
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
