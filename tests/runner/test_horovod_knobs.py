"""Every variable and option that Horovod documents works, or says in one line that it does nothing here."""

import os
from pathlib import Path

import pytest
from jobs import Hororun

from horo.config.ignored import AT_BUILD, PASSED_OVER, misspelt, passed_over
from horo.config.table import GROUPS, Config, names_of, variables_of
from horo.runner.cli import parse

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


def test_variables_of_the_build_are_named_in_one_line() -> None:
    environ = {"HOROVOD_GPU_ALLREDUCE": "NCCL", "HOROVOD_WITH_PYTORCH": "1"}
    (sentence,) = passed_over(environ)
    assert sentence == (
        "HOROVOD_WITH_PYTORCH, HOROVOD_GPU_ALLREDUCE do nothing here: horo is the same for every torch, MPI and GPU"
    )
    assert set(AT_BUILD).isdisjoint(names_of(*GROUPS))


def test_a_misspelt_name_of_horovods_is_pointed_out() -> None:
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
