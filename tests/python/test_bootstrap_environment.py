"""Which launcher: complete environments are understood, half ones are errors."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horo.bootstrap.launchers.variables import TorchMaster, read_launch, subset
from horo.bootstrap.net.addresses import Endpoint
from horo.errors import UsageError

HORORUN = {
    "HOROVOD_RANK": "5", "HOROVOD_SIZE": "8", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "4",
    "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2", "HOROVOD_HOSTNAME": "h2",
    "HORO_STORE": "10.0.0.1:4711,[fd00::1]:4711", "HORO_SECRET": "ab" * 32, "HORO_JOB_ID": "j17",
}  # fmt: skip
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "h1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "run7", "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "712", "SLURM_STEP_ID": "3", "SLURM_PROCID": "5", "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "h[1-2]", "SLURMD_NODENAME": "h2",
}  # fmt: skip


def test_no_launcher_is_a_job_of_one() -> None:
    launch = read_launch({"PATH": "/bin", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "HORO_JOB_ID": "x"})
    assert (launch.kind, launch.rank, launch.size, launch.host_name) == ("none", 0, 1, socket.gethostname())


def test_hororun_is_understood_and_comes_before_torchs_variables() -> None:
    for environ in (HORORUN, {**HORORUN, **TORCHRUN, "RANK": "0"}):
        launch = read_launch(environ)
        assert (launch.kind, launch.rank, launch.size, launch.host_name) == ("hororun", 5, 8, "h2")
        assert (launch.local, launch.cross, launch.node, launch.job_id) == ((1, 4), (1, 2), None, "j17")
        assert launch.endpoints == (Endpoint("10.0.0.1", 4711), Endpoint("fd00::1", 4711))
        assert launch.secret == b"\xab" * 32
        assert launch.torch_master is None


def test_torchrun_is_understood() -> None:
    launch = read_launch(TORCHRUN)
    assert (launch.kind, launch.rank, launch.size, launch.local, launch.node) == ("torchrun", 5, 8, (1, 4), 1)
    assert launch.torch_master == TorchMaster("h1", 29500, True)
    assert launch.job_id == "run7/2"
    plain = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    launch = read_launch(plain)
    assert launch.torch_master == TorchMaster("h1", 29500, False)
    assert (launch.local, launch.node, launch.job_id) == (None, None, "none/0")


def test_size_one_needs_no_store() -> None:
    assert read_launch({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}).size == 1
    assert read_launch({"RANK": "0", "WORLD_SIZE": "1"}).torch_master is None


MISSING = [*((HORORUN, name) for name in ("HOROVOD_RANK", "HOROVOD_SIZE", "HORO_STORE", "HORO_SECRET")),
           *((TORCHRUN, name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))]  # fmt: skip


@pytest.mark.parametrize(("environ", "missing"), MISSING, ids=[name for _, name in MISSING])
def test_each_missing_part_of_a_launcher_is_named(environ: dict[str, str], missing: str) -> None:
    with pytest.raises(UsageError, match=f"incomplete launcher environment: .* but not .*{missing}") as caught:
        read_launch({name: value for name, value in environ.items() if name != missing})
    assert "ab" * 16 not in str(caught.value)


@pytest.mark.parametrize("lonely", ["HORO_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "RANK", "LOCAL_RANK"])
def test_one_variable_alone_is_never_a_silent_job_of_one(lonely: str) -> None:
    with pytest.raises(UsageError, match="incomplete launcher environment"):
        read_launch({lonely: "1"})


CONTRADICTIONS = [
    (HORORUN, {"HOROVOD_RANK": "8"}, "HOROVOD_RANK=8 is not below HOROVOD_SIZE=8"),
    (HORORUN, {"HOROVOD_RANK": "-1"}, "HOROVOD_RANK='-1' is not an integer from 0"),
    (HORORUN, {"HOROVOD_SIZE": "0"}, "HOROVOD_SIZE='0' is not an integer from 1"),
    (HORORUN, {"HOROVOD_LOCAL_RANK": "4"}, "HOROVOD_LOCAL_RANK=4 is not below HOROVOD_LOCAL_SIZE=4"),
    (HORORUN, {"HOROVOD_LOCAL_RANK": ""}, "but not HORO_LOCAL_RANK or HOROVOD_LOCAL_RANK"),
    (HORORUN, {"HOROVOD_LOCAL_SIZE": "9"}, "HOROVOD_LOCAL_SIZE=9 is more than HOROVOD_SIZE=8"),
    (HORORUN, {"HORO_STORE": "h1:4711"}, "'h1:4711' in 'h1:4711' is not ADDRESS:PORT"),
    (HORORUN, {"HORO_SECRET": "abc"}, "HORO_SECRET (3 characters) is not hexadecimal digits for at least 16 bytes"),
    (TORCHRUN, {"RANK": "8"}, "RANK=8 is not below WORLD_SIZE=8"),
    (TORCHRUN, {"MASTER_PORT": "70000"}, "MASTER_PORT='70000' is not an integer from 1 to 65535"),
    (TORCHRUN, {"LOCAL_RANK": "4"}, "LOCAL_RANK=4 is not below LOCAL_WORLD_SIZE=4"),
    (SLURM, {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST, which names the nodes, is missing"),
    (SLURM, {"SLURM_STEP_NODELIST": "h[1-"}, "SLURM_STEP_NODELIST: 'h[1-' in the host list"),
    (SLURM, {"SLURM_PROCID": "8"}, "SLURM_PROCID='8' is no number below 8"),
    (SLURM, {"SLURM_PROCID": "x"}, "SLURM_PROCID='x' is no number below 8"),
    (SLURM, {"SLURM_NODEID": "2"}, "SLURM_NODEID='2' is no number below 2"),
    (SLURM, {"SLURM_LOCALID": "4"}, "SLURM_LOCALID='4' is no number below 4"),
    (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "4(x"}, "SLURM_STEP_TASKS_PER_NODE: '4(x' in '4(x' is no count of tasks"),
]


@pytest.mark.parametrize(("environ", "changes", "told"), CONTRADICTIONS, ids=[told for *_, told in CONTRADICTIONS])
def test_a_contradiction_is_named(environ: dict[str, str], changes: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_launch({**environ, **changes})
    assert told in str(caught.value)


def test_slurm_is_understood_and_comes_last() -> None:
    launch = read_launch(SLURM)
    assert (launch.kind, launch.rank, launch.size, launch.local, launch.node) == ("slurm", 5, 8, (1, 4), 1)
    assert (launch.job_id, launch.secret) == ("712.3.0", None)
    assert launch.slurm is not None
    assert (launch.slurm.hosts, launch.slurm.node_name) == (("h1", "h2"), "h2")
    assert read_launch({**SLURM, "HORO_SECRET": "ab" * 16}).secret == b"\xab" * 16
    assert read_launch({**SLURM, **HORORUN}).kind == "hororun"
    assert read_launch({**SLURM, **TORCHRUN}).kind == "torchrun"


def test_slurm_step_without_its_own_count_and_nodes_takes_the_jobs() -> None:
    environ = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP_")}
    launch = read_launch({**environ, "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "a,b"})
    assert launch.slurm is not None
    assert (launch.size, launch.slurm.hosts, launch.local) == (8, ("a", "b"), None)


def test_a_subset_is_numbered_by_its_list_and_has_a_name_of_its_own() -> None:
    launch = read_launch(HORORUN)
    some = subset(launch, [7, 5, 2])
    assert (some.rank, some.size, some.started_rank, some.ranks) == (1, 3, 5, (7, 5, 2))
    assert (some.local, some.cross, some.endpoints) == (None, None, launch.endpoints)
    names = {subset(launch, ranks).job_id for ranks in ([7, 5, 2], [5, 7, 2], [5], range(8))}
    assert len(names | {launch.job_id}) == 5


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([], "the list names no rank"),
        ([5, 8], "8 is no rank of this job, which has ranks 0 to 7"),
        ([-1, 5], "-1 is no rank of this job"),
        ([5, 0, 5], "rank 5 is listed 2 times"),
        ([0, 1], "this process is rank 5, which is not in the list"),
        ([5, "0"], "a list of ranks holds integers only"),
        ([5, 0.5], "a list of ranks holds integers only"),
    ],
)
def test_a_list_that_cannot_be_a_job_is_refused(ranks: list[Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        subset(read_launch(HORORUN), ranks)
    assert told in str(caught.value)


def test_a_subset_needs_rank_0_where_that_hosts_torchs_store() -> None:
    unserved = read_launch({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert subset(unserved, [5, 0]).size == 2
    with pytest.raises(UsageError, match="rank 0 does, so it must be among the ranks"):
        subset(unserved, [5, 1])
    assert subset(read_launch(TORCHRUN), [5, 1]).rank == 0


@pytest.mark.parametrize(
    "environ",
    [
        {"HORO_SECRET": "ab" * 16},
        {"SLURM_NTASKS": "4"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_plain_python_inside_an_allocation_is_a_job_of_one(environ: dict[str, str]) -> None:
    assert read_launch(environ).kind == "none"


names = st.sampled_from(sorted({*HORORUN, *TORCHRUN, *SLURM}))
values = st.sampled_from(["", "0", "1", "2", "-1", "x", "10.0.0.1:1", "ab" * 16, "h[1-2]", "2(x2)"])


@given(st.dictionaries(names, values))
def test_any_environment_is_understood_or_a_usage_error(environ: dict[str, str]) -> None:
    try:
        launch = read_launch(environ)
    except UsageError:
        return
    assert 0 <= launch.rank < launch.size
    if launch.size > 1:
        hororun = launch.endpoints and launch.secret
        assert launch.torch_master is not None or launch.slurm is not None or hororun
