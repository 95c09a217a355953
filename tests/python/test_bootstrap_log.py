"""Lines of the bootstrap look like those of the core, and keep out of a program's own logging."""

from __future__ import annotations

import logging
import resource
from pathlib import Path

import pytest

from horo.bootstrap.job import start
from horo.bootstrap.log import prepare_log


def bare_logging(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """As in a program that has configured nothing: pytest puts handlers of its own on the root around each test."""
    log = logging.getLogger("horo")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "level", logging.NOTSET)
    monkeypatch.setattr("horo.bootstrap.log._given", [logging.NOTSET])
    return log


def test_a_line_names_the_rank_and_the_level(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = bare_logging(monkeypatch)
    prepare_log("warning", 3)
    log.warning("refused %s", "a connection")
    log.info("not at this level")
    assert capsys.readouterr().err == "horo [3] warning: refused a connection\n"


def test_a_second_start_does_not_say_everything_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = bare_logging(monkeypatch)
    prepare_log("warning", 3)
    prepare_log("info", 1)
    log.info("once")
    assert capsys.readouterr().err == "horo [1] info: once\n"


def test_a_program_with_its_own_logging_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    log = bare_logging(monkeypatch)
    logging.getLogger().addHandler(logging.NullHandler())
    prepare_log("warning", 0)
    assert log.handlers == []


@pytest.mark.parametrize("own", [logging.DEBUG, logging.INFO, logging.ERROR])
def test_the_level_of_the_program_stays(monkeypatch: pytest.MonkeyPatch, own: int) -> None:
    log = bare_logging(monkeypatch)
    log.setLevel(own)
    prepare_log("warning", 0)
    assert log.level == own
    log.setLevel(logging.NOTSET)
    prepare_log("warning", 0)
    assert log.level == logging.WARNING
    prepare_log("info", 0)  # the next start of the process has its own
    assert log.level == logging.INFO
    log.setLevel(own + 1)
    prepare_log("warning", 0)
    assert log.level == own + 1


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("trace", ["debug", "info", "warning", "error"]),
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("error", ["error"]),
        ("off", []),
        ("fatal", []),
    ],
)
def test_each_level_shows_itself_and_what_is_worse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: str, shown: list[str]
) -> None:
    log = bare_logging(monkeypatch)
    prepare_log(level, 0)
    for name in ("debug", "info", "warning", "error"):
        getattr(log, name)("text")
    assert capsys.readouterr().err == "".join(f"horo [0] {name}: text\n" for name in shown)


def test_messages_of_the_core_of_a_job_are_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    job = start({})
    try:
        job.context.start_timeline(str(tmp_path / "t.json"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        job.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (record,) = [record for record in caplog.records if record.name == "horo.engine"]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("the timeline ends here, since it cannot be written: ")
