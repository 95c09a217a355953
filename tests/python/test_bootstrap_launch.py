"""Which launcher: complete environments are understood, half ones are errors, foreign ones are refused."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horo._bootstrap.addresses import Endpoint
from horo._bootstrap.launch import TorchMaster, detect_launch
from horo._errors import UnsupportedError, UsageError

HORORUN = {
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "8",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "4",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_HOSTNAME": "h2",
    "HORO_STORE": "10.0.0.1:4711,[fd00::1]:4711",
    "HORO_SECRET": "ab" * 32,
    "HORO_JOB_ID": "j17",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "h1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_no_launcher_is_a_job_of_one() -> None:
    launch = detect_launch({"PATH": "/bin", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "HORO_JOB_ID": "x"})
    assert (launch.kind, launch.rank, launch.size, launch.host_name) == ("none", 0, 1, socket.gethostname())


def test_hororun_is_understood_and_comes_before_torchs_variables() -> None:
    for environ in (HORORUN, {**HORORUN, **TORCHRUN, "RANK": "0"}):
        launch = detect_launch(environ)
        assert (launch.kind, launch.rank, launch.size, launch.host_name) == ("hororun", 5, 8, "h2")
        assert (launch.local, launch.cross, launch.node, launch.job_id) == ((1, 4), (1, 2), None, "j17")
        assert launch.endpoints == (Endpoint("10.0.0.1", 4711), Endpoint("fd00::1", 4711))
        assert launch.secret == b"\xab" * 32
        assert launch.torch_master is None


def test_torchrun_is_understood() -> None:
    launch = detect_launch(TORCHRUN)
    assert (launch.kind, launch.rank, launch.size, launch.local, launch.node) == ("torchrun", 5, 8, (1, 4), 1)
    assert launch.torch_master == TorchMaster("h1", 29500, True)
    assert launch.job_id == "run7/2"
    plain = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    launch = detect_launch(plain)
    assert launch.torch_master == TorchMaster("h1", 29500, False)
    assert (launch.local, launch.node, launch.job_id) == (None, None, "none/0")


def test_size_one_needs_no_store() -> None:
    assert detect_launch({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}).size == 1
    assert detect_launch({"RANK": "0", "WORLD_SIZE": "1"}).torch_master is None


@pytest.mark.parametrize("missing", ["HOROVOD_RANK", "HOROVOD_SIZE", "HORO_STORE", "HORO_SECRET"])
def test_each_missing_part_of_hororun_is_named(missing: str) -> None:
    environ = {name: value for name, value in HORORUN.items() if name != missing}
    with pytest.raises(UsageError, match=f"half there: .* but not .*{missing}") as caught:
        detect_launch(environ)
    assert "ab" * 16 not in str(caught.value)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_each_missing_part_of_torchrun_is_named(missing: str) -> None:
    with pytest.raises(UsageError, match=f"half there: .* but not {missing}"):
        detect_launch({name: value for name, value in TORCHRUN.items() if name != missing})


@pytest.mark.parametrize(
    "lonely", ["HORO_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK"]
)
def test_one_variable_alone_is_never_a_silent_job_of_one(lonely: str) -> None:
    with pytest.raises(UsageError, match="half there"):
        detect_launch({lonely: "1"})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"HOROVOD_RANK": "8"}, "HOROVOD_RANK=8 is not below HOROVOD_SIZE=8"),
        ({"HOROVOD_RANK": "-1"}, "HOROVOD_RANK='-1' is not an integer from 0"),
        ({"HOROVOD_RANK": "one"}, "HOROVOD_RANK='one' is not an integer"),
        ({"HOROVOD_SIZE": "0"}, "HOROVOD_SIZE='0' is not an integer from 1"),
        ({"HOROVOD_LOCAL_RANK": "4"}, "HOROVOD_LOCAL_RANK=4 is not below HOROVOD_LOCAL_SIZE=4"),
        ({"HOROVOD_LOCAL_RANK": ""}, "but not HORO_LOCAL_RANK or HOROVOD_LOCAL_RANK"),
        ({"HOROVOD_LOCAL_SIZE": "9"}, "HOROVOD_LOCAL_SIZE=9 is more than HOROVOD_SIZE=8"),
        ({"HORO_STORE": "h1:4711"}, "'h1:4711' in 'h1:4711' is not ADDRESS:PORT"),
        ({"HORO_SECRET": "abc"}, "HORO_SECRET (3 characters) is not hexadecimal digits for at least 16 bytes"),
    ],
)
def test_contradictions_of_hororun_are_named(changes: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        detect_launch({**HORORUN, **changes})
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"RANK": "8"}, "RANK=8 is not below WORLD_SIZE=8"),
        ({"RANK": "x"}, "RANK='x' is not an integer"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT='70000' is not an integer from 1 to 65535"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 is not below LOCAL_WORLD_SIZE=4"),
    ],
)
def test_contradictions_of_torchrun_are_named(changes: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        detect_launch({**TORCHRUN, **changes})
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}, "mpirun"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "mpirun"),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}, "srun"),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_ID": "3"}, "srun"),
    ],
)
def test_launchers_not_served_yet_are_refused_with_what_to_use(environ: dict[str, str], launcher: str) -> None:
    with pytest.raises(UnsupportedError, match=f"started by {launcher}, .*start the job with hororun or torchrun"):
        detect_launch(environ)
    assert detect_launch({**environ, **HORORUN}).kind == "hororun"
    assert detect_launch({**environ, **TORCHRUN}).kind == "torchrun"


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_SIZE": "1"},
        {"SLURM_NTASKS": "4"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_plain_python_inside_an_allocation_is_a_job_of_one(environ: dict[str, str]) -> None:
    assert detect_launch(environ).kind == "none"


names = st.sampled_from(sorted({*HORORUN, *TORCHRUN, "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"}))
values = st.sampled_from(["", "0", "1", "2", "-1", "x", "10.0.0.1:1", "ab" * 16])


@given(st.dictionaries(names, values))
def test_any_environment_is_understood_or_a_usage_error(environ: dict[str, str]) -> None:
    try:
        launch = detect_launch(environ)
    except UsageError:
        return
    assert 0 <= launch.rank < launch.size
    if launch.size > 1:
        assert launch.torch_master is not None or (launch.endpoints and launch.secret)
