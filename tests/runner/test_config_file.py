"""``--config-file``: a YAML file stands for options."""

import sys
from pathlib import Path

import parsing
import pytest

from horo.runner.cli import parse
from horo.runner.config import Job, JobError
from horo.runner.hosts import HostSpec

HOROVODS = """
controller: mpi
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 2.5
  cache_capacity: 16
timeline:
  filename: /tmp/timeline.json
  mark_cycles: true
stall_check:
  enabled: true
  warning_time_seconds: 30
  shutdown_time_seconds: 60
logging:
  level: INFO
"""
SET = {
    "HORO_FUSION_THRESHOLD": str(32 << 20), "HORO_CYCLE_TIME": "2.5", "HORO_CACHE_CAPACITY": "16",
    "HORO_TIMELINE": "/tmp/timeline.json", "HORO_TIMELINE_MARK_CYCLES": "1", "HORO_STALL_CHECK_DISABLE": "0",
    "HORO_STALL_CHECK_TIME_SECONDS": "30", "HORO_STALL_SHUTDOWN_TIME_SECONDS": "60", "HORO_LOG_LEVEL": "info",
}  # fmt: skip


def parsed(folder: Path, text: str, *words: str) -> Job:
    (folder / "job.yaml").write_text(text)
    return parsing.parsed(["-np", "2", *words, "--config-file", str(folder / "job.yaml"), "cmd"])


def test_a_file_in_horovods_form_is_options(tmp_path: Path) -> None:
    job = parsed(tmp_path, HOROVODS)
    assert job.exports == SET
    assert job.launcher == "mpi"
    assert parsed(tmp_path, "stall_check: {enabled: false}").exports == {"HORO_STALL_CHECK_DISABLE": "1"}
    assert parsed(tmp_path, "").exports == parsed(tmp_path, "params:\n").exports == {}


def test_options_of_the_command_line_win(tmp_path: Path) -> None:
    words = ["--gloo", "--fusion-threshold-mb", "1", "--no-stall-check", "--log-level", "error"]
    text = "controller: mpi\nparams: {fusion_threshold_mb: 2}\nstall_check: {enabled: true}\nlogging: {level: info}"
    job = parsed(tmp_path, text, *words)
    assert job.launcher == "ssh"
    wanted = {"HORO_FUSION_THRESHOLD": str(1 << 20), "HORO_STALL_CHECK_DISABLE": "1", "HORO_LOG_LEVEL": "error"}
    assert job.exports == wanted


LESS = [
    ("stall_check: {warning_time_seconds: 30, shutdown_time_seconds: 60}", "--no-stall-check"),
    ("options: {stall_check_warning_time_seconds: 30}", "--no-stall-check"),
    ("options: {hosts: 'a:2'}", "--hostfile {folder}/hosts"),
    ("options: {hostfile: nowhere}", "-H b:2"),
    ("options: {prefix_timestamp: true, prefix_host: true}", "--no-prefix"),
    ("stall_check: {shutdown_time_seconds: 60}", "--stall-check-warning-time-seconds 0"),
]


@pytest.mark.parametrize(("text", "words"), LESS, ids=[f"{text} and {words}" for text, words in LESS])
def test_what_the_command_line_makes_useless_in_a_file_does_not_count(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("b:2\n")
    given = words.format(folder=tmp_path).split()
    alone = parse(["-np", "2", *given, "cmd"])
    assert parsed(tmp_path, text, *given) == alone


def test_times_of_stall_checks_that_are_off_in_the_file_do_not_count(tmp_path: Path) -> None:
    text = "stall_check: {enabled: false, warning_time_seconds: 120, shutdown_time_seconds: 240}"
    assert parsed(tmp_path, text).exports == {"HORO_STALL_CHECK_DISABLE": "1"}
    job = parsed(tmp_path, text, "--stall-check")
    assert job.exports == {
        "HORO_STALL_CHECK_DISABLE": "0",
        "HORO_STALL_CHECK_TIME_SECONDS": "120",
        "HORO_STALL_SHUTDOWN_TIME_SECONDS": "240",
    }


@pytest.mark.parametrize("name", ["HORO_CYCLE_TIME", "HOROVOD_CYCLE_TIME"])
def test_a_variable_of_the_command_line_wins(name: str, tmp_path: Path) -> None:
    job = parsed(tmp_path, "params: {cycle_time_ms: 2, cache_capacity: 3}", "-x", f"{name}=4")
    assert job.exports == {name: "4", "HORO_CACHE_CAPACITY": "3"}
    assert job.sources == {"HORO_CACHE_CAPACITY": f"file {tmp_path}/job.yaml"}
    text = "options: {network_interfaces: lo, start_timeout: 3, no_move_ranks: true}"
    names = {"HORO_NETWORK_INTERFACES": "eth0", "HORO_START_TIMEOUT": "9", "HORO_LEAVE_CROWDED_CORES": "1"}
    job = parsed(tmp_path, text, *(word for each, value in names.items() for word in ("-x", f"{each}={value}")))
    assert (job.exports, job.interfaces, job.sources) == (names, (), {})


@pytest.mark.parametrize("text", ["", "params: {cycle_time_ms: 2}"])
def test_a_variable_of_the_command_line_wins_over_its_other_name_in_the_environment(text: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text)
    words = ["-np", "2", "--config-file", str(tmp_path / "job.yaml"), "-x", "HOROVOD_CYCLE_TIME=4", "cmd"]
    job = parse(words, environment={"HORO_CYCLE_TIME": "9", "HORO_CACHE_CAPACITY": "3"})
    assert job is not None
    assert job.exports == {"HORO_CYCLE_TIME": "4", "HOROVOD_CYCLE_TIME": "4"}


def test_any_option_can_be_named(tmp_path: Path) -> None:
    text = (
        "options:\n  hosts: a:1,b:1\n  bind_to: core\n  oversubscribe: true\n  no-prefix: false\n  grace_seconds: 9\n"
    )
    job = parsed(tmp_path, text)
    assert job.hosts == (HostSpec("a", slots=1), HostSpec("b", slots=1))
    assert (job.bind_to, job.oversubscribe, job.output.prefix, job.grace_s) == ("core", True, True, 9)
    assert parsed(tmp_path, text, "-H", "c:2").hosts == (HostSpec("c", slots=2),)


def test_what_only_tunes_horovod_is_passed_over(tmp_path: Path) -> None:
    job = parsed(tmp_path, "params: {torus_allreduce: false}\nautotune: {gaussian_process_noise: 0.8}")
    assert [sentence.split()[0] for sentence in job.passed_over] == [
        "--no-torus-allreduce",
        "--autotune-gaussian-process-noise",
    ]
    assert job.exports == {}


WRONG = [
    ("parms: {a: 1}", "'parms' is no section: did you mean 'params'?"),
    ("params: {cycle_time: 1}", "'cycle_time' is no key of params: did you mean 'cycle_time_ms'?"),
    ("params: [1]", "params is no mapping of names to values"),
    ("- a", "the file is no mapping of names to values"),
    ("params: {cache_capacity: true}", "params: cache_capacity: True is no value of --cache-capacity"),
    ("stall_check: {enabled: 3}", "stall_check: enabled: 3 is neither true nor false"),
    ("controller: ccl", "controller: 'ccl' is neither 'gloo' nor 'mpi'"),
    ("options: {bindto: core}", "'--bindto' is no option: did you mean '--bind-to'?"),
    ("options: {config_file: x}", "'--config-file' is no option"),
    ("params: {cache_capacity: 1, cache_capacity: 2}", "line 1: 'cache_capacity' is there twice, first in line 1"),
    ("timeline:\n  filename: a\nlogging:\ntimeline: {}", "line 4: 'timeline' is there twice, first in line 1"),
    ("options: [{np: 1}, {np: 1, 'np': 2}]", "line 1: 'np' is there twice"),
    ("options:\n  bind_to: core\n  bind-to: numa", "options: bind-to: '--bind-to' is there twice"),
    ("a: [", "cannot be read: while parsing"),
]


@pytest.mark.parametrize(("text", "sentence"), WRONG, ids=[text for text, _ in WRONG])
def test_what_is_wrong_is_named(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        parsed(tmp_path, text)
    assert str(caught.value).startswith(f"--config-file {tmp_path}/job.yaml: {sentence}")


def test_a_value_that_its_option_refuses_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(tmp_path, "params: {cache_capacity: many}")
    file = f"hororun: --config-file {tmp_path}/job.yaml: "
    assert f"{file}--cache-capacity: 'many' is not an integer from 0 to 1048576" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parsed(tmp_path, "autotune: {gaussian_process_noise: loud}")
    assert f"{file}--autotune-gaussian-process-noise: 'loud' is not a number" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parsed(tmp_path, "params: {cache_capacity: 3}", "--cycle-time-ms", "slow")
    assert "hororun: --cycle-time-ms: 'slow' is not a number" in capsys.readouterr().err


def test_an_option_of_the_file_that_does_not_fit_is_said_to_be_in_it(tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        parsed(tmp_path, "options: {bind_to: core}", "--mpi", "-H", "a:2")
    assert str(caught.value) == (
        f"--bind-to (in {tmp_path}/job.yaml) is for --launcher slurm and ssh; ranks of this job are started by mpi"
    )


def test_a_file_that_is_not_there_and_a_yaml_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="no-file: cannot be read: No such file or directory"):
        parse(["-np", "1", "--config-file", "no-file", "cmd"])
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(JobError, match="--config-file needs PyYAML: pip install pyyaml"):
        parsed(tmp_path, "")
