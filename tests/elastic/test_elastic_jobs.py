"""Elastic jobs on one host, by hororun, as real processes."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import TORCH_S, Hororun, Launched, wait_until

from horo.runner.cli import parse
from horo.runner.config import JobError

WORKER = str(Path(__file__).with_name("elastic_worker.py"))
PATIENCE_S = 3 * TORCH_S


class Elastic(Hororun):
    """Starts elastic jobs."""

    def train(self, *words: str, code: int = 0, **environment: str) -> tuple[str, str]:
        """The outputs of a job of ``elastic_worker``, on stdout and stderr, each line without its prefix."""
        split = next(index for index, word in enumerate(words) if word.isdigit() and words[index - 1][0] != "-")
        command = [*words[:split], WORKER, *words[split:]]
        job = self.start(*command, environment=environment).finish(PATIENCE_S)
        assert job.returncode == code, job.stderr
        return re.sub(r"^\[\d+\] ", "", job.stdout, flags=re.M), job.stderr


@pytest.fixture
def elastic() -> Iterator[Elastic]:
    started = Elastic()
    yield started
    started.clean_up()


def ends(out: str) -> dict[int, int]:
    """The steps that each worker had at its end."""
    return {int(worker): int(steps) for worker, steps in re.findall(r"^end (\d+) (\d+)$", out, re.M)}


def test_a_killed_rank_0_is_replaced_and_the_others_go_on(elastic: Elastic) -> None:
    out, err = elastic.train("-np", "3", "--min-np", "3", "40", "0:10:kill")
    assert ends(out) == {1: 40, 2: 40, 3: 40}
    assert "worker 1 is 0 of 3 at 10" in out
    assert "worker 3 is 2 of 3 at 10" in out
    assert "hororun: worker 0 (rank 0) was killed by SIGKILL" in err
    assert "the last events on this rank" not in err
    assert "hororun: 2 generations of workers 0-3; training stood still for" in err
    assert re.search(r"^hororun: 1 +3 +0-2 +0 \(killed by SIGKILL\)$", err, re.M)
    assert re.search(r"^hororun: 2 +3 +\d+\.\d s +3$", err, re.M)


def test_fewer_ranks_go_on_and_a_newcomer_joins_while_they_train(elastic: Elastic, tmp_path: Path) -> None:
    told = {"STOP_FILE": str(tmp_path / "stop")}
    job = elastic.start("-np", "2", "--min-np", "1", "--no-prefix", WORKER, "1000000", "1:10:kill", environment=told)
    job.said_until("worker 0 is 0 of 1 at 10\n")  # it does not wait for the newcomer
    job.said_until("worker 0 is 0 of 2 at ")
    (tmp_path / "stop").touch()
    done = job.finish(PATIENCE_S)
    assert done.returncode == 0 and ends(done.stdout).keys() == {0, 2}, done.stderr
    assert len(set(ends(done.stdout).values())) == 1
    assert "generation 3: 2 ranks (workers 0, 2)" in done.stderr


def test_the_lines_of_rank_0_are_those_of_the_lowest_rank_of_each_generation_and_each_worker_has_a_file(
    elastic: Elastic, tmp_path: Path
) -> None:
    """And what a rank has left behind has ended before another one takes its place."""
    words = ("-np", "2", "--min-np", "2", "--output", "rank0", "--output-filename", str(tmp_path))
    out, _ = elastic.train(*words, "20", "0:10:leave")
    assert "worker 0 is 0 of 2 at 0" in out and "worker 1 is 0 of 2 at 10" in out
    assert "worker 2" not in out and ends(out) == {1: 20}
    texts = [(tmp_path / f"rank.{worker}" / "stdout").read_text() for worker in range(3)]
    assert "worker 0 is 0 of 2 at 0" in texts[0]
    assert "end 1 20" in texts[1] and "end 2 20" in texts[2]
    child = re.search(r"child (\d+)", out)
    assert child is not None and not Path(f"/proc/{child[1]}").exists()


def test_a_rank_that_hangs_is_killed_and_named_with_its_stack(elastic: Elastic) -> None:
    limits = {"HORO_STALL_CHECK_TIME_SECONDS": "1", "HORO_STALL_SHUTDOWN_TIME_SECONDS": "3"}
    out, err = elastic.train("-np", "3", "--min-np", "2", "30", "1:10:hang", **limits)
    assert {0: 30, 2: 30}.items() <= ends(out).items()
    assert "error 0 StalledError" in out
    assert "hororun: worker 1 (rank 1) does not go on, and is killed" in err
    assert re.search(r"elastic_worker.py\", line \d+ in do$", err, re.M), err


def test_ranks_that_die_before_init_are_replaced(elastic: Elastic) -> None:
    out, err = elastic.train("-np", "2", "--min-np", "2", "5", "1:init:kill")
    assert ends(out) == {0: 5, 2: 5}
    assert "hororun: worker 1 was killed by SIGKILL" in err
    assert "generations" not in err


@pytest.mark.parametrize(("deed", "code"), [("init:exit", 3), ("made:raise", 1)])
def test_an_error_before_training_ends_the_job_and_starts_nothing(elastic: Elastic, deed: str, code: int) -> None:
    out, err = elastic.train("-np", "2", "--min-np", "1", "30", f"0:{deed}", f"1:{deed}", code=code)
    assert ends(out) == {}
    assert "starts" not in err and "generation" not in err
    assert re.search(r"hororun: worker [01] on localhost e(nded with|xited with code 3).*; the job was ended", err)


def test_a_script_that_python_cannot_read_ends_the_job_at_once(elastic: Elastic, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("if\n")
    done = elastic.start("-np", "2", "--min-np", "1", str(script)).finish()
    assert done.returncode == 1
    assert "SyntaxError: invalid syntax" in done.stderr and "starts" not in done.stderr


def test_a_command_that_is_not_there_ends_the_job_with_a_sentence(elastic: Elastic) -> None:
    done = elastic.start("-np", "2", "--min-np", "1", "./no-such-program").finish()
    assert (done.returncode, done.stderr) == (127, "hororun: no such file on localhost: './no-such-program'\n")


def test_the_death_of_all_ranks_ends_the_job_with_its_cause(elastic: Elastic) -> None:
    out, err = elastic.train("-np", "2", "--min-np", "1", "30", "0:10:exit", "1:10:exit", code=3)
    assert ends(out) == {}
    assert re.search(r"hororun: worker [01] on localhost ended with SystemExit: 3 .*; the job was ended", err)


def test_a_rank_that_an_exception_ends_is_reported_with_it(elastic: Elastic) -> None:
    _, err = elastic.train("-np", "2", "--min-np", "1", "30", "1:10:raise")
    assert "hororun: worker 1 (rank 1) ended with ValueError: a mistake (elastic_worker.py, line " in err
    assert re.search(r"^hororun: 1 +2 +0-1 +1 \(ValueError: a mistake\)$", err, re.M)


def test_a_rank_that_dies_after_training_ends_the_job_with_its_code(elastic: Elastic) -> None:
    out, err = elastic.train("-np", "2", "--min-np", "1", "10", "1:done:kill", code=137)
    assert ends(out) == {0: 10}
    assert "worker 1 on localhost was killed by SIGKILL; the job was ended" in err
    assert "starts" not in err


def test_too_few_ranks_end_the_job_in_time(elastic: Elastic) -> None:
    words = ("-np", "2", "--min-np", "2", "--elastic-timeout", "0.5")
    _, err = elastic.train(*words, "30", "0:10:kill", "2:init:hang", code=75)
    assert "hororun: 1 rank within 0.5 s (--elastic-timeout), of at least 2 (--min-np)" in err


def test_a_worker_that_had_to_leave_is_no_cause_of_the_end(elastic: Elastic, tmp_path: Path) -> None:
    script, fewer, file = tmp_path / "hosts", tmp_path / "fewer", tmp_path / "report.json"
    script.write_text(f'#!/bin/sh\n[ -e "{fewer}" ] && echo localhost:1 || echo localhost:2\n')
    script.chmod(0o755)
    words = ("--host-discovery-script", str(script), "--elastic-timeout", "2", "--json-report", str(file))
    job = elastic.start("-np", "2", "--min-np", "2", *words, WORKER, "1000000", where=None)
    job.said_until("of 2 at 0")
    fewer.touch()
    done = job.finish(PATIENCE_S)
    assert done.returncode == 75, done.stderr
    assert "hororun: 1 rank within 2 s (--elastic-timeout), of at least 2 (--min-np)" in done.stderr
    assert "the job was ended" not in done.stderr
    report = json.loads(file.read_text())
    assert report["cause"] is None and all(each["asked"] for each in report["workers"])
    assert report["generations"][0]["went"] == [{"worker": 1, "why": "localhost has fewer slots now"}]


def test_the_reset_limit_ends_the_job(elastic: Elastic) -> None:
    _, err = elastic.train("-np", "2", "--min-np", "1", "--reset-limit", "0", "30", "0:10:kill", code=137)
    assert "hororun: ranks cannot be placed anew any more (--reset-limit 0)" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_job_and_starts_nothing(elastic: Elastic, number: signal.Signals) -> None:
    job = elastic.start("-np", "2", "--min-np", "1", WORKER, "1000000")
    wait_until(lambda: len(job.processes(WORKER)) > 2, "hororun and two workers run")
    job.process.send_signal(number)
    ended = job.finish(PATIENCE_S)
    assert ended.returncode == 128 + number
    assert "starts" not in ended.stderr


def test_nothing_is_left_of_a_job_whose_hororun_is_killed(elastic: Elastic) -> None:
    job = elastic.start("-np", "2", "--min-np", "2", WORKER, "1000000", "0:init:kill")
    wait_until(lambda: b"worker 2 starts" in os.read(stderr_of(job), 4096), "a replacement runs", deadline_s=TORCH_S)
    job.process.kill()
    job.finish(PATIENCE_S)


def test_a_signal_is_the_cause_and_no_failure_before_it(elastic: Elastic) -> None:
    job = elastic.start("-np", "2", "--min-np", "2", WORKER, "1000000", "1:3:kill")
    wait_until(lambda: b"worker 2 starts" in os.read(stderr_of(job), 4096), "a replacement starts", deadline_s=TORCH_S)
    job.process.send_signal(signal.SIGINT)
    ended = job.finish(PATIENCE_S)
    assert ended.returncode == 128 + signal.SIGINT
    assert re.search(r"hororun: SIGINT: (the job was|workers [-\d, ]+ were) ended", ended.stderr)


def test_no_failure_before_it_is_the_cause_of_the_end_of_a_job_that_leaves(elastic: Elastic, tmp_path: Path) -> None:
    words = ("--elastic-dir", str(tmp_path), WORKER, "1000000", "1:3:kill", "2:init:hang")
    job = elastic.start("-np", "2", "--min-np", "2", *words)
    wait_until(lambda: b"training waits for 2" in os.read(stderr_of(job), 4096), "too few ranks", deadline_s=TORCH_S)
    job.process.send_signal(signal.SIGTERM)
    ended = job.finish(PATIENCE_S)
    assert ended.returncode == 0, ended.stderr
    assert "the job was ended" not in ended.stderr


def stderr_of(job: Launched) -> int:
    """The descriptor of what hororun writes to stderr."""
    assert job.process.stderr is not None
    return job.process.stderr.fileno()


def test_commands_that_are_no_ranks_end_as_in_any_job(elastic: Elastic) -> None:
    assert elastic.start("-np", "2", "--min-np", "1", "echo", "hi").finish().returncode == 0
    assert elastic.start("-np", "2", "--min-np", "1", "false").finish().returncode == 1


def test_more_ranks_than_slots_are_refused(elastic: Elastic) -> None:
    done = elastic.start("-np", "2", "--min-np", "1", "--max-np", "9", "true").finish()
    assert done.returncode == 2 and "up to 9 ranks (--max-np, or else -np) need as many slots" in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("-np", "2", "--min-np", "3"), "-np 2 must lie between --min-np 3 and --max-np 2"),
        (("-np", "2", "--min-np", "1", "--max-np", "1"), "-np 2 must lie between --min-np 1 and --max-np 1"),
        (("-np", "2", "--reset-limit", "1"), "--reset-limit is for an elastic job: add --min-np N"),
        (("-np", "2", "--min-np", "1", "--host-timeout", "2"), "--host-timeout 2 is too short for an elastic job"),
        (("-np", "2", "--max-np", "3"), "--max-np is for an elastic job: add --min-np N"),
        (("-np", "2", "--elastic-timeout", "1"), "--elastic-timeout is for an elastic job"),
        (("-np", "2", "--min-np", "1", "--no-torch-env"), "--no-torch-env is not for an elastic job"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(JobError) as caught:
        parse([*words, "-H", "localhost:8", "true"], environment={})
    assert sentence in str(caught.value)
