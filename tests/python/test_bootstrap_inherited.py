"""Who may take a place in a job: not a process that has inherited it from a rank."""

from __future__ import annotations

import os
import socket

import pytest

from horo.bootstrap.launchers import inherited
from horo.bootstrap.launchers.variables import Launch
from horo.errors import UsageError

HORORUN = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HORO_STORE": "127.0.0.1:1", "HORO_JOB_ID": "j", "RANK": "1"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "r"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-h-7@1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "-1"}
SLURM = {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


def child_of(rank: dict[str, str], monkeypatch: pytest.MonkeyPatch, **launch: object) -> dict[str, str]:
    """The environment that a process started by this rank, another process, has."""
    named: list[str] = []
    with monkeypatch.context() as context:
        context.setattr(inherited, "name_for_children", named.append)
        context.setattr(os, "getpid", lambda: 4_999_999)
        inherited.name_rank(rank, Launch("hororun", 1, 2, "h", **launch))  # type: ignore[arg-type]
    return {**rank, "HORO_RANK_PROCESS": named[0]} if named else dict(rank)


@pytest.mark.parametrize("rank", [HORORUN, TORCHRUN, OPEN_MPI, MPICH, SLURM])
def test_a_child_with_the_ranks_place_is_refused(rank: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"started by rank 1 \(process 4999999\), has inherited its environment"):
        inherited.refuse_inherited(child_of(rank, monkeypatch))


@pytest.mark.parametrize(
    ("rank", "own"),
    [
        (HORORUN, {"HORO_JOB_ID": "k"}),
        (HORORUN, {"HOROVOD_RANK": "0"}),
        (HORORUN, dict.fromkeys(HORORUN, "")),
        (TORCHRUN, {"MASTER_PORT": "2"}),
        (TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "1"}),
        (TORCHRUN, HORORUN),
        (OPEN_MPI, {"PMIX_NAMESPACE": "prterun-h-8@1"}),
        (MPICH, {"PMI_FD": "99999"}),
        (SLURM, {"SLURM_STEP_ID": "1"}),
        (SLURM, HORORUN),
    ],
)
def test_a_child_with_another_place_or_none_is_let_in(
    rank: dict[str, str], own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited.refuse_inherited({**child_of(rank, monkeypatch), **own})


TORCH_ENV = {**HORORUN, "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
SINCE = [
    (HORORUN, TORCHRUN, "HORO_STORE HORO_JOB_ID HOROVOD_RANK", "RANK"),
    (TORCH_ENV, {"MASTER_PORT": "2"}, "HORO_STORE HORO_JOB_ID HOROVOD_RANK", "RANK"),
    (HORORUN, OPEN_MPI, "HORO_STORE RANK WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    (HORORUN, SLURM, "HORO_STORE RANK", "SLURM_PROCID"),
    (TORCHRUN, MPICH, "RANK MASTER_ADDR", "PMI_RANK"),
]


@pytest.mark.parametrize(("rank", "since", "dropped", "kept"), SINCE)
def test_a_place_that_was_given_since_counts_and_those_before_are_dropped(
    rank: dict[str, str], since: dict[str, str], dropped: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = inherited.refuse_inherited({**child_of(rank, monkeypatch), **since})
    assert set(dropped.split()) <= names
    assert kept not in names
    again = child_of({**rank, **since}, monkeypatch)  # an inner rank that has dropped them: its children are refused
    with pytest.raises(UsageError, match="inherited"):
        inherited.refuse_inherited(
            {name: value for name, value in again.items() if name not in names or "PROC" in name}
        )


@pytest.mark.parametrize(
    "changed",
    [
        {"LOCAL_RANK": "0"},  # as trainers set it
        {"RANK": "0"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_JOB_ID": "9", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},  # the shell of salloc
        {"PMI_FD": "0"},
    ],
)
def test_what_is_no_place_among_several_changes_nothing(
    changed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="inherited"):
        inherited.refuse_inherited({**child_of(HORORUN, monkeypatch), **changed})


def test_torchs_variables_that_repeat_the_ranks_place_are_none_to_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    child = {**child_of(HORORUN, monkeypatch), "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert inherited.refuse_inherited(child)
    monkeypatch.setattr(inherited, "parent_process", os.getpid)
    with pytest.raises(UsageError, match="inherited"):
        inherited.refuse_inherited(child)
    assert inherited.refuse_inherited({**child, "RANK": "0"})


def test_variables_hidden_from_a_library_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    child = child_of(HORORUN, monkeypatch)
    del child["RANK"]
    with pytest.raises(UsageError, match="inherited"):
        inherited.refuse_inherited(child)


def test_the_rank_itself_may_start_again_and_a_process_id_that_came_again_is_another() -> None:
    for is_another in (False, True):
        named: list[str] = []
        with pytest.MonkeyPatch.context() as context:
            context.setattr(inherited, "name_for_children", named.append)
            if is_another:
                context.setattr(inherited, "_start_of_process", lambda: 1)
            inherited.name_rank(HORORUN, Launch("hororun", 1, 2, "h"))
        environ = {**HORORUN, "HORO_RANK_PROCESS": named[0]}
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
    inherited.name_rank(HORORUN, Launch("hororun", 0, 1, "h", ranks=(1,)))  # a part of a larger job
    assert len(named) == 1


def test_a_value_that_init_did_not_write_is_named() -> None:
    with pytest.raises(UsageError, match=r"HORO_RANK_PROCESS='7' is not what init\(\) writes there; unset it"):
        inherited.refuse_inherited({"HORO_RANK_PROCESS": "7"})
