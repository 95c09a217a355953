"""Which launcher: complete environments are understood, half ones are errors."""

import os
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horo.bootstrap.launchers import inherited
from horo.bootstrap.launchers.variables import Launch, TorchMaster, read_launch, subset
from horo.bootstrap.net.addresses import Endpoint
from horo.config.hosts import HOSTS_MAX, parse_counts, parse_host_list
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


def test_no_launcher_is_a_job_of_one_and_hororun_comes_before_torchrun() -> None:
    launch = read_launch({"PATH": "/bin", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "HORO_JOB_ID": "x"})
    assert (launch.kind, launch.rank, launch.size, launch.host_name) == ("none", 0, 1, socket.gethostname())
    for environ in (HORORUN, {**HORORUN, **TORCHRUN, "RANK": "0"}):
        launch = read_launch(environ)
        assert (launch.kind, launch.rank, launch.size, launch.host_name) == ("hororun", 5, 8, "h2")
        assert (launch.local, launch.cross, launch.node, launch.job_id) == ((1, 4), (1, 2), None, "j17")
        assert launch.endpoints == (Endpoint("10.0.0.1", 4711), Endpoint("fd00::1", 4711))
        assert launch.secret == b"\xab" * 32
        assert launch.torch_master is None
    launch = read_launch(TORCHRUN)
    assert (launch.kind, launch.rank, launch.size, launch.local, launch.node) == ("torchrun", 5, 8, (1, 4), 1)
    assert launch.torch_master == TorchMaster("h1", 29500, True)
    assert launch.job_id == "run7"
    plain = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    launch = read_launch(plain)
    assert launch.torch_master == TorchMaster("h1", 29500, False)
    assert (launch.local, launch.node, launch.job_id) == (None, None, "none")
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


def test_slurm_is_understood_and_comes_last_and_a_step_without_its_own_count_takes_the_jobs() -> None:
    launch = read_launch(SLURM)
    assert (launch.kind, launch.rank, launch.size, launch.local, launch.node) == ("slurm", 5, 8, (1, 4), 1)
    assert (launch.job_id, launch.secret) == ("712.3.0", None)
    assert launch.slurm is not None
    assert (launch.slurm.hosts, launch.slurm.node_name) == (("h1", "h2"), "h2")
    assert read_launch({**SLURM, "HORO_SECRET": "ab" * 16}).secret == b"\xab" * 16
    assert read_launch({**SLURM, **HORORUN}).kind == "hororun"
    assert read_launch({**SLURM, **TORCHRUN}).kind == "torchrun"
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
        ([], "the list names no rank"), ([5, 8], "8 is no rank of this job, which has ranks 0 to 7"),
        ([-1, 5], "-1 is no rank of this job"), ([5, 0, 5], "rank 5 is listed 2 times"),
        ([0, 1], "this process is rank 5, which is not in the list"),
        ([5, "0"], "a list of ranks holds integers only"), ([5, 0.5], "a list of ranks holds integers only"),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("x", ["x"]), ("a,b.example.org", ["a", "b.example.org"]),
        ("h[1-3,07-10],x", ["h1", "h2", "h3", "h07", "h08", "h09", "h10", "x"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]), ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[0-1]n[01-02]-ib", ["r0n01-ib", "r0n02-ib", "r1n01-ib", "r1n02-ib"]), ("[3,1]", ["3", "1"]),
        ("b,a[2,1]", ["b", "a2", "a1"]),
    ],
)  # fmt: skip
def test_a_list_names_its_hosts_in_order(text: str, hosts: list[str]) -> None:
    assert parse_host_list(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,,b", "a,", "h[", "h]", "h[]", "h[1", "h1]", "h[3-1]", "h[a-b]", "h[1-]", "h[[1]]", "h[1-2-3]", "a b"],
)
def test_a_damaged_list_is_named_in_the_error(text: str) -> None:
    with pytest.raises(ValueError, match="host list") as raised:
        parse_host_list(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize("text", ["h[0-99999999999]", "h[0-999][0-999]", ",".join(["h[1-60000]"] * 2)])
def test_a_list_that_no_cluster_has_costs_no_memory(text: str) -> None:
    with pytest.raises(ValueError, match=str(HOSTS_MAX)):
        parse_host_list(text)


@given(st.text("h[]-,019x ", max_size=12) | st.text(max_size=12))
def test_any_text_is_a_list_of_hosts_or_a_sentence(text: str) -> None:
    try:
        hosts = parse_host_list(text)
    except ValueError as error:
        assert str(error)
    else:
        assert hosts
        assert all(hosts)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 9)), min_size=1, max_size=9))
def test_counts_are_repeated_as_often_as_they_say(items: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{repeat})" if repeat > 1 else str(count) for count, repeat in items)
    assert parse_counts(text) == [count for count, repeat in items for _ in range(repeat)]


@pytest.mark.parametrize("text", ["", "x", "2(x", "2(x3", "-1", "2,,1", "2(3)", "1(x99999999)"])
def test_damaged_counts_are_named_in_the_error(text: str) -> None:
    with pytest.raises(ValueError, match="tasks") as raised:
        parse_counts(text)
    assert repr(text) in str(raised.value)


HORORUN_PLACE = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HORO_STORE": "127.0.0.1:1", "HORO_JOB_ID": "j", "RANK": "1"}
TORCHRUN_PLACE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "r"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-h-7@1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "-1"}
SLURM_PLACE = {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


def child_of(rank: dict[str, str], monkeypatch: pytest.MonkeyPatch, **launch: object) -> dict[str, str]:
    """The environment that a process started by this rank, another process, has."""
    named: list[str] = []
    with monkeypatch.context() as context:
        context.setattr(inherited, "name_for_children", named.append)
        context.setattr(os, "getpid", lambda: 4_999_999)
        inherited.name_rank(rank, Launch("hororun", 1, 2, "h", **launch))  # type: ignore[arg-type]
    return {**rank, "HORO_RANK_PROCESS": named[0]} if named else dict(rank)


NO_PLACE = [
    *((rank, {}) for rank in (HORORUN_PLACE, TORCHRUN_PLACE, OPEN_MPI, MPICH, SLURM_PLACE)),
    (HORORUN_PLACE, {"LOCAL_RANK": "0"}),  # as trainers set it
    (HORORUN_PLACE, {"RANK": "0"}),
    (HORORUN_PLACE, {"RANK": ""}),  # hidden from a library
    (HORORUN_PLACE, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}),
    (HORORUN_PLACE, {"SLURM_JOB_ID": "9", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}),  # the shell of salloc
    (HORORUN_PLACE, {"PMI_FD": "0"}),
]


@pytest.mark.parametrize(("rank", "changed"), NO_PLACE)
def test_a_child_with_the_ranks_place_is_refused(
    rank: dict[str, str], changed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"started by rank 1 \(process 4999999\), has inherited its environment"):
        inherited.refuse_inherited({**child_of(rank, monkeypatch), **changed})


@pytest.mark.parametrize(
    ("rank", "own"),
    [
        (HORORUN_PLACE, {"HORO_JOB_ID": "k"}), (HORORUN_PLACE, {"HOROVOD_RANK": "0"}),
        (HORORUN_PLACE, dict.fromkeys(HORORUN_PLACE, "")), (TORCHRUN_PLACE, {"MASTER_PORT": "2"}),
        (TORCHRUN_PLACE, {"TORCHELASTIC_RESTART_COUNT": "1"}), (TORCHRUN_PLACE, HORORUN_PLACE),
        (OPEN_MPI, {"PMIX_NAMESPACE": "prterun-h-8@1"}), (MPICH, {"PMI_FD": "99999"}),
        (SLURM_PLACE, {"SLURM_STEP_ID": "1"}), (SLURM_PLACE, HORORUN_PLACE),
    ],
)  # fmt: skip
def test_a_child_with_another_place_or_none_is_let_in(
    rank: dict[str, str], own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited.refuse_inherited({**child_of(rank, monkeypatch), **own})


TORCH_ENV = {**HORORUN_PLACE, "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
SINCE = [
    (HORORUN_PLACE, TORCHRUN_PLACE, "HORO_STORE HORO_JOB_ID HOROVOD_RANK", "RANK"),
    (TORCH_ENV, {"MASTER_PORT": "2"}, "HORO_STORE HORO_JOB_ID HOROVOD_RANK", "RANK"),
    (HORORUN_PLACE, OPEN_MPI, "HORO_STORE RANK WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    (HORORUN_PLACE, SLURM_PLACE, "HORO_STORE RANK", "SLURM_PROCID"),
    (TORCHRUN_PLACE, MPICH, "RANK MASTER_ADDR", "PMI_RANK"),
]


@pytest.mark.parametrize(("rank", "since", "dropped", "kept"), SINCE)
def test_a_place_that_was_given_since_counts_and_those_before_are_dropped(
    rank: dict[str, str], since: dict[str, str], dropped: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = inherited.refuse_inherited({**child_of(rank, monkeypatch), **since})
    assert set(dropped.split()) <= names
    assert kept not in names
    left = {name: value for name, value in {**rank, **since}.items() if name not in names}
    again = child_of(left, monkeypatch)  # an inner rank has dropped them: its children are refused
    with pytest.raises(UsageError, match="inherited"):
        inherited.refuse_inherited(again)


def test_torchs_variables_that_repeat_the_ranks_place_are_none_to_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    child = {**child_of(HORORUN_PLACE, monkeypatch), "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert inherited.refuse_inherited(child)
    monkeypatch.setattr(inherited, "parent_process", os.getpid)
    with pytest.raises(UsageError, match="inherited"):
        inherited.refuse_inherited(child)
    assert inherited.refuse_inherited({**child, "RANK": "0"})


def test_the_rank_itself_may_start_again_and_a_process_id_that_came_again_is_another() -> None:
    for is_another in (False, True):
        named: list[str] = []
        with pytest.MonkeyPatch.context() as context:
            context.setattr(inherited, "name_for_children", named.append)
            if is_another:
                context.setattr(inherited, "_start_of_process", lambda: 1)
            inherited.name_rank(HORORUN_PLACE, Launch("hororun", 1, 2, "h"))
        environ = {**HORORUN_PLACE, "HORO_RANK_PROCESS": named[0]}
        if is_another:
            with pytest.raises(UsageError, match="inherited"):
                inherited.refuse_inherited(environ)
        else:
            inherited.refuse_inherited(environ)


def test_a_nested_job_of_mpich_with_equal_numbers_has_a_connection_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = socket.socketpair()
    rank = {**MPICH, "PMI_FD": str(first.fileno())}
    child = child_of(rank, monkeypatch)
    with pytest.raises(UsageError, match="inherited"):  # os.system leaves the descriptor open
        inherited.refuse_inherited(child)
    os.dup2(second.fileno(), first.fileno())
    inherited.refuse_inherited(child)  # another socket under the same number: another mpirun's
    number = first.fileno()
    first.close()
    with pytest.raises(UsageError, match="inherited"):  # subprocess and multiprocessing close it
        inherited.refuse_inherited({**child, "PMI_FD": str(number)})
    second.close()


def test_a_job_of_one_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []
    monkeypatch.setattr(inherited, "name_for_children", named.append)
    inherited.name_rank({}, Launch("none", 0, 1, "h"))
    assert named == []
    inherited.name_rank(HORORUN_PLACE, Launch("hororun", 0, 1, "h", ranks=(1,)))  # a part of a larger job
    assert len(named) == 1


def test_a_value_that_init_did_not_write_is_named() -> None:
    with pytest.raises(UsageError, match=r"HORO_RANK_PROCESS='7' is not what init\(\) writes there; unset it"):
        inherited.refuse_inherited({"HORO_RANK_PROCESS": "7"})
