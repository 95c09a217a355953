"""Every option in every kind of job, those of a ``--config-file``, and all options and variables of Horovod."""

import os
import re
import sys
from pathlib import Path

import parsing
import pytest
from jobs import Hororun

from horo.config.ignored import AT_BUILD, PASSED_OVER, misspelt, passed_over
from horo.config.table import GROUPS, Config, names_of, variables_of
from horo.runner.cli import main, parse
from horo.runner.cli.options import build_parser
from horo.runner.config import Job, JobError
from horo.runner.hosts import HostSpec

KINDS = {
    "one-host": (["-np", "2"], ["cmd"]),
    "two-hosts": (["-np", "2", "-H", "a:1,b:1"], ["cmd"]),
    "by-slurm": (["-np", "2", "--launcher", "slurm"], ["cmd"]),
    "by-mpirun": (["-np", "2", "--launcher", "mpi", "-H", "a:1,b:1"], ["cmd"]),
    "by-jsrun": (["-np", "2", "--launcher", "jsrun"], ["cmd"]),
    "check-hosts": (["--check-hosts", "-H", "a:1,b:1"], []),
    "check-build": (["--check-build"], []),
    "attach": (["--attach", "77"], []),
}
"""What stands before the option that is tried, and after it."""
SLURM = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a,b", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}
LSF = {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a 1 b 1"}

OWN = {"one-host", "two-hosts", "by-slurm"}
JOBS = {*OWN, "by-mpirun", "by-jsrun"}
BY_SSH = {"two-hosts", "by-mpirun", "check-hosts"}
REMOTE = {"two-hosts", "by-slurm", "check-hosts"}
NOT_BY_JSRUN = JOBS - {"by-jsrun"}
_IN_ALL_JOBS = """
--dry-run|--no-prefix|--output-filename out|--timeline-merge all.json --timeline-filename t-{{rank}}.json
--grace-seconds 3|--config-file {yaml}|--no-keep-memory|--no-move-ranks|--no-single-copy|--fusion-threshold-mb 1
--cycle-time-ms 1|--cache-capacity 1|--timeline-filename t.json|--timeline-mark-cycles --timeline-filename t.json
--no-timeline-mark-cycles|--autotune|--no-autotune|--autotune-log-file log.csv --autotune
--autotune-warmup-samples 1 --autotune|--autotune-steps-per-sample 2 --autotune
--autotune-bayes-opt-max-samples 9 --autotune|--no-stall-check|--stall-check|--stall-check-warning-time-seconds 3
--stall-check-shutdown-time-seconds 3|--log-level info|--deadlock-time-seconds 3|--peer-timeout 3
--segment-bytes 8192|--spin-us 0|--overlap never|--gradients-ready step|--no-first-checks|--check-nan
--gpu-operations nccl|--transport tcp|--sockets-per-peer 2
"""
_IN_OWN_JOBS = """
--min-np 1|--max-np 3 --min-np 1|--reset-limit 3 --min-np 1|--elastic-timeout 3 --min-np 1|--elastic-dir d --min-np 1
--elastic-join now --min-np 1|--on-failure host --min-np 1|--blacklist-cooldown-range 5 60 --min-np 1
--output rank0|--bind-to core|--bind-gpus|--store-port 5000|--no-torch-env|--master-port 5001|--prefix-host
--json-report r.json|--summary|--no-summary|--live|--metrics-port 9400|--failure-seconds 3
"""


def rows(options: str, kinds: set[str]) -> dict[str, tuple[str, set[str]]]:
    return {each.split()[0][2:].replace("-", "_"): (each, kinds) for each in re.split(r"[|\n]", options.strip())}


EFFECT = {
    **rows(_IN_ALL_JOBS, JOBS),
    **rows(_IN_OWN_JOBS, OWN),
    "num_proc": ("-np 2", JOBS),
    "hosts": ("-H a:1,b:1", JOBS | {"check-hosts"}),
    "hostfile": ("--hostfile {file}", JOBS | {"check-hosts"}),
    "oversubscribe": ("--oversubscribe", NOT_BY_JSRUN),
    "host_discovery_script": ("--host-discovery-script x", {"one-host", "by-slurm"}),
    "slots_per_host": ("--host-discovery-script x --slots-per-host 2", {"one-host", "by-slurm"}),
    "launcher": ("--gloo", {"one-host", "two-hosts", "check-hosts"}),
    "horovod": ("--horovod", JOBS | {"check-build"}),
    "exports": ("-x A=1", JOBS),
    "network_interfaces": ("--network-interfaces lo", NOT_BY_JSRUN | {"check-hosts"}),
    "port_range": ("--port-range 40000-40100", JOBS | {"check-hosts"}),
    "prefix_timestamp": ("--prefix-timestamp", NOT_BY_JSRUN),
    "attach": ("--attach 77", {"attach"}),
    "stacks": ("--stacks", {"attach"}),
    "verbose": ("--verbose", JOBS | {"check-hosts"}),
    "start_timeout": ("--start-timeout 3", JOBS | {"check-hosts"}),
    "host_timeout": ("--host-timeout 3", REMOTE),
    "ssh_port": ("-p 2222", BY_SSH),
    "ssh_identity_file": ("-i key", BY_SSH),
    "ssh_args": ("--ssh-args=-v", BY_SSH),
    "remote_shell": ("--remote-shell rsh", BY_SSH),
    "remote_python": ("--remote-python /py", REMOTE),
    "mpirun": ("--mpirun m", {"by-mpirun"}),
    "mpi_args": ("--mpi-args=-v", {"by-mpirun", "by-jsrun"}),
    "binding_args": ("--binding-args=-v", {"by-mpirun", "by-jsrun"}),
    "tcp": ("--tcp", {"by-mpirun", "by-jsrun"}),
    "check_hosts": ("--check-hosts", {"check-hosts"}),
    "check_build": ("--check-build", {"check-build"}),
    "bench": ("--bench", set()),  # has no command beside it
}
"""An example of each option, and the kinds of jobs in which it has an effect."""
SHOWN_AT_ONCE = {"help", "version"}


def test_every_option_has_a_row() -> None:
    options = {action.dest for action in build_parser()._actions} - SHOWN_AT_ONCE - {"refused"}
    assert options == EFFECT.keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", EFFECT)
def test_an_option_has_an_effect_or_is_refused_by_name(
    option: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path_factory.mktemp("job")
    (folder / "hosts").write_text("a slots=1\nb slots=1\n")
    (folder / "options.yaml").write_text("params: {cycle_time_ms: 2}\n")
    (folder / "jsrun").write_text("#!/bin/sh\n")
    (folder / "jsrun").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    for name, value in {"by-slurm": SLURM, "by-jsrun": LSF}.get(kind, {}).items():
        monkeypatch.setenv(name, value)
    example, kinds = EFFECT[option]
    before, after = KINDS[kind]
    words = example.format(file=folder / "hosts", yaml=folder / "options.yaml").split()
    if words[0] == "--hostfile" and "-H" in before:
        before = [word for word in before if word not in ("-H", "a:1,b:1")]
    if words[0] in before:  # it makes the job what it is
        return
    refusal = ""
    try:
        parse([*before, *words, *after])
    except JobError as error:
        refusal = str(error)
    except SystemExit:
        refusal = capfd.readouterr().err
    if kind in kinds:
        assert refusal == ""
    else:
        assert words[0].partition("=")[0] in refusal


@pytest.mark.parametrize(
    ("line", "similar"),
    [
        ("--verbos", "--verbose"),
        ("--host a", "--hosts"),
        ("--timestmap", "--prefix-timestamp"),
        ("--np 2", "-np"),
        ("--pn 2", "-np"),
        ("--p 22", "-p"),
        ("--timeline t.json", "--timeline-filename, --timeline-mark-cycles or --timeline-merge"),
        ("--bind core", "--bind-gpus, --bind-to or --binding-args"),
        ("--nproc-per-node=2", ""),
        ("--zz", ""),
        ("--output-file=x", "--output-filename"),
        ("--qqqqqq", ""),
    ],
)
def test_an_unknown_option_gets_a_similar_one(line: str, similar: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*line.split(), "cmd"])
    word = line.split(maxsplit=1)[0].partition("=")[0]
    hint = f": did you mean {similar}?" if similar else ""
    assert (end.value.code, capfd.readouterr().err) == (
        2,
        f"hororun: there is no option {word!r}{hint} (try 'hororun --help')\n",
    )


@pytest.mark.parametrize("where", ["localhost:1", "one:1"], ids=["direct", "agents"])
@pytest.mark.parametrize("words", [["true"], ["--dry-run", "true"]], ids=["run", "dry-run"])
def test_an_interface_that_is_not_here_is_refused_in_every_job(hororun: Hororun, where: str, words: list[str]) -> None:
    done = hororun.run("-np", "1", "--network-interfaces", "nosuch0,203.0.113.0/24", *words, where=where)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (78, "", 1)
    assert (
        "--network-interfaces nosuch0,203.0.113.0/24: none of them has an address here; this machine has" in done.stderr
    )
    assert "lo 127.0.0.1" in done.stderr


def test_ranks_that_shall_stay_do_so_and_what_hororun_only_suggests_may_be_set(hororun: Hororun) -> None:
    show = ["--no-prefix", "--", "sh", "-c", "echo $HORO_LEAVE_CROWDED_CORES"]
    environment = {"HORO_LEAVE_CROWDED_CORES": "1"}
    assert hororun.run("-np", "1", "--no-move-ranks", *show, environment=environment).stdout == "0\n"
    assert hororun.run("-np", "1", *show, environment={"HORO_LEAVE_CROWDED_CORES": "0"}).stdout == "0\n"
    assert hororun.run("-np", "1", *show).stdout == "1\n"
    show = ["--no-prefix", "--", "sh", "-c", "echo ${PYTHONUNBUFFERED-none}"]
    assert hororun.run("-np", "1", *show).stdout == "1\n"
    assert hororun.run("-np", "1", "-x", "PYTHONUNBUFFERED=", *show).stdout == "\n"


HOROVODS = """
controller: mpi
params: {fusion_threshold_mb: 32, cycle_time_ms: 2.5, cache_capacity: 16}
timeline:
  filename: /tmp/timeline.json
  mark_cycles: true
stall_check: {enabled: true, warning_time_seconds: 30, shutdown_time_seconds: 60}
logging: {level: INFO}
"""
SET = {
    "HORO_FUSION_THRESHOLD": str(32 << 20), "HORO_CYCLE_TIME": "2.5", "HORO_CACHE_CAPACITY": "16",
    "HORO_TIMELINE": "/tmp/timeline.json", "HORO_TIMELINE_MARK_CYCLES": "1", "HORO_STALL_CHECK_DISABLE": "0",
    "HORO_STALL_CHECK_TIME_SECONDS": "30", "HORO_STALL_SHUTDOWN_TIME_SECONDS": "60", "HORO_LOG_LEVEL": "info",
}  # fmt: skip


def parsed(folder: Path, text: str, *words: str) -> Job:
    (folder / "job.yaml").write_text(text)
    return parsing.parsed(["-np", "2", *words, "--config-file", str(folder / "job.yaml"), "cmd"])


def test_a_file_in_horovods_form_is_options_over_which_the_command_line_wins(tmp_path: Path) -> None:
    job = parsed(tmp_path, HOROVODS)
    assert job.exports == SET
    assert job.launcher == "mpi"
    assert parsed(tmp_path, "stall_check: {enabled: false}").exports == {"HORO_STALL_CHECK_DISABLE": "1"}
    assert parsed(tmp_path, "").exports == parsed(tmp_path, "params:\n").exports == {}
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


_NAMES = """
FUSION_THRESHOLD CYCLE_TIME CACHE_CAPACITY HIERARCHICAL_ALLREDUCE HIERARCHICAL_ALLGATHER TORUS_ALLREDUCE AUTOTUNE
AUTOTUNE_LOG AUTOTUNE_WARMUP_SAMPLES AUTOTUNE_STEPS_PER_SAMPLE AUTOTUNE_BAYES_OPT_MAX_SAMPLES
AUTOTUNE_GAUSSIAN_PROCESS_NOISE TIMELINE TIMELINE_MARK_CYCLES STALL_CHECK_DISABLE STALL_CHECK_TIME_SECONDS
STALL_SHUTDOWN_TIME_SECONDS NUM_NCCL_STREAMS THREAD_AFFINITY BATCH_D2D_MEMCOPIES DISABLE_GROUP_FUSION
DISABLE_NVTX_RANGES ENABLE_ASYNC_COMPLETION ENABLE_XLA_OPS DYNAMIC_PROCESS_SETS ELASTIC ADASUM_MPI_CHUNK_SIZE
CPU_OPERATIONS CONTROLLER MPI_THREADS_DISABLE CCL_CACHE LOG_LEVEL LOG_HIDE_TIME RANK SIZE LOCAL_RANK LOCAL_SIZE
CROSS_RANK CROSS_SIZE HOSTNAME GLOO_RENDEZVOUS_ADDR GLOO_RENDEZVOUS_PORT GLOO_IFACE GLOO_TIMEOUT_SECONDS START_TIMEOUT
ELASTIC_TIMEOUT SPARK_START_TIMEOUT SPARK_WORK_DIR SPARK_PYTHONPATH SPARK_USE_LOCAL_RANK_GPU_INDEX WITH_PYTORCH
WITHOUT_PYTORCH WITH_TENSORFLOW WITHOUT_TENSORFLOW WITH_MXNET WITHOUT_MXNET WITH_MPI WITHOUT_MPI WITH_GLOO
WITHOUT_GLOO WITH_NVTX WITHOUT_NVTX GPU GPU_OPERATIONS GPU_ALLREDUCE GPU_ALLGATHER GPU_BROADCAST GPU_ALLTOALL
GPU_REDUCESCATTER ALLOW_MIXED_GPU_IMPL CUDA_HOME NCCL_HOME NCCL_INCLUDE NCCL_LIB NCCL_LINK ROCM_HOME NVTX_INCLUDE
BUILD_ARCH_FLAGS BUILD_CUDA_CC_LIST CMAKE DEBUG SKIP_COMPILE LOCAL_VERSION
"""
VARIABLES = _NAMES.split()
"""Those of Horovod 0.28.1, without ``HOROVOD_``: for its core, its launchers, and its build."""
FOR_VALUES = {"GPU_OPERATIONS": "NCCL", "CONTROLLER": "gloo", "LOG_LEVEL": "INFO", "HOSTNAME": "h"}


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_works_or_says_in_one_line_that_it_does_nothing(name: str) -> None:
    full = f"HOROVOD_{name}"
    said = passed_over({full: "1"})
    owner = next((group for group in GROUPS if full in names_of(group)), None)
    if owner is None:
        assert len(said) == 1
        assert said[0].startswith(f"{full} does nothing here: ")
        assert "\n" not in said[0]
        if full in PASSED_OVER:
            assert passed_over({f"HORO_{name}": "1"}) == [said[0].replace("HOROVOD_", "HORO_", 1)]
    else:
        if name.startswith("AUTOTUNE_"):
            assert said == [f"{full} does nothing without HORO_AUTOTUNE=1"]
            said = passed_over({full: "1", "HOROVOD_AUTOTUNE": "1"})
        if name == "TIMELINE_MARK_CYCLES":
            assert said == [f"{full} does nothing without HORO_TIMELINE"]
            said = passed_over({full: "1", "HOROVOD_TIMELINE": "t.json"})
        assert said == []
        (read,) = [each for each in variables_of(owner).values() if full in each.names]
        assert read.read({full: FOR_VALUES.get(name, "1")}) is not None
    assert misspelt({full: "1"}) == []


def test_variables_of_the_build_are_named_in_one_line_and_misspelt_names_pointed_out() -> None:
    environ = {"HOROVOD_GPU_ALLREDUCE": "NCCL", "HOROVOD_WITH_PYTORCH": "1"}
    (sentence,) = passed_over(environ)
    assert sentence == (
        "HOROVOD_WITH_PYTORCH, HOROVOD_GPU_ALLREDUCE do nothing here: horo is the same for every torch, MPI and GPU"
    )
    assert set(AT_BUILD).isdisjoint(names_of(*GROUPS))
    assert misspelt({"HOROVOD_CYCLE_TIMES": "1", "HOROVOD_AUTOTUNES": "1"}) == [
        "HOROVOD_AUTOTUNES is no variable of horo and means nothing: did you mean HOROVOD_AUTOTUNE?",
        "HOROVOD_CYCLE_TIMES is no variable of horo and means nothing: did you mean HOROVOD_CYCLE_TIME?",
    ]


OPTIONS = (
    """
-np 2|--num-proc 2|--disable-cache|--start-timeout 9|--network-interfaces lo|--network-interface lo
--output-filename out|--verbose|-p 22 -H a:2|--ssh-port 22 -H a:2|-i key -H a:2|--ssh-identity-file key -H a:2
--fusion-threshold-mb 8|--cycle-time-ms 1|--cache-capacity 9
--hierarchical-allreduce|--no-hierarchical-allreduce|--hierarchical-allgather|--no-hierarchical-allgather
--torus-allreduce|--no-torus-allreduce|--autotune|--no-autotune|--autotune-log-file x|--autotune-warmup-samples 1
--autotune-steps-per-sample 1|--autotune-bayes-opt-max-samples 1|--autotune-gaussian-process-noise 0.5
--min-np 1|--min-num-proc 1|--max-np 1|--max-num-proc 1|--slots-per-host 1|--elastic-timeout 1|--reset-limit 1
--blacklist-cooldown-range 1 2|--host-discovery-script x
--timeline-filename x|--timeline-mark-cycles|--no-timeline-mark-cycles
--no-stall-check|--stall-check|--stall-check-warning-time-seconds 9|--stall-check-shutdown-time-seconds 9
--mpi-threads-disable|--no-mpi-threads-disable|--mpi-args=-v --mpi|--tcp --mpi|--binding-args=-v --mpi
--num-nccl-streams 1|--thread-affinity 1|--gloo-timeout-seconds 9
--log-level TRACE|--log-level FATAL|--log-with-timestamp|--log-without-timestamp|-prefix-timestamp
--prefix-output-with-timestamp|--log-hide-timestamp|--no-log-hide-timestamp
-H a:2|--hosts a:2|-hostfile {folder}/hosts|--hostfile {folder}/hosts|--config-file {folder}/job.yaml
--gloo|--mpi -H a:2
""".replace("\n", "|")
    .strip("|")
    .split("|")
)
"""All that take part in a job; ``--jsrun``, ``--version`` and ``--check-build`` are shown elsewhere."""


@pytest.mark.parametrize("line", OPTIONS)
def test_an_option_works_or_says_in_one_line_why_not(line: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\n")
    (tmp_path / "job.yaml").write_text("params: {cycle_time_ms: 2}\n")
    words = line.format(folder=tmp_path).split()
    place = [] if line.startswith(("-np", "--num-proc")) else ["-np", "2"]
    job = parse([*place, *words, "cmd"], for_horovod=True, environment={"PATH": os.environ["PATH"]})
    assert job is not None
    assert job.command == ("cmd",)
    assert all(sentence.startswith(f"{words[0]} does nothing here: ") for sentence in job.passed_over)
    assert len(job.passed_over) <= 1


SHOWS = """
import os
from horo.config.settings import settings_of
from horo.config.table import read_config
settings = settings_of(read_config(os.environ, {"cache_capacity": 5}))
names = ("cycle_time_ms", "spin_us", "cache_capacity", "fusion_threshold", "stall_check_time_s", "peer_timeout_s")
print(*(f"{settings[name]:.15g} from {settings.source(name)}" for name in names), sep="; ")
"""


def test_a_rank_knows_where_each_setting_comes_from(hororun: Hororun, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHOWS)
    (tmp_path / "job.yaml").write_text("params: {cycle_time_ms: 2}\noptions: {spin_us: 7, peer_timeout: 8}\n")
    options = "--no-prefix -np 2 --config-file job.yaml --fusion-threshold-mb 1 --peer-timeout 9"
    environment = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "30", "HORO_CYCLE_TIME": "9"}
    done = hororun.run(*options.split(), "train.py", where="one:1,two:1", cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    line = (
        "2 from file job.yaml; 7 from file job.yaml; 5 from init(); 1048576 from hororun --fusion-threshold-mb; "
        "30 from HOROVOD_STALL_CHECK_TIME_SECONDS; 9 from hororun --peer-timeout"
    )
    assert done.stdout.splitlines() == [line, line]


def test_every_key_of_a_file_is_an_option() -> None:
    keys = [option.key for each in variables_of(Config).values() for option in each.options if option.key]
    assert "params: fusion_threshold_mb" in keys
    assert all(key.count(": ") == 1 for key in keys)
