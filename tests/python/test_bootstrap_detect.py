"""The launcher that is found when MPI, Slurm and others could have started a process; with a fake MPI."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from horo.bootstrap.launchers import detect as detect_module
from horo.bootstrap.launchers.detect import detect_launch, rank_of_launcher
from horo.bootstrap.mpi import world as mpi_launch
from horo.config.table import read_config
from horo.errors import ResourceError, UsageError

HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "h[1-2]", "SLURM_NODEID": "0",
}  # fmt: skip
HORORUN = {"HORO_RANK": "0", "HORO_SIZE": "2", "HORO_STORE": "127.0.0.1:1", "HORO_SECRET": "ab" * 16}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}


class Comm:
    """A communicator as far as these tests need one."""

    __module__ = "mpi4py.MPI"

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._attributes: dict[Any, Any] = {}

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def Get_attr(self, key: Any) -> Any:
        return self._attributes.get(key)

    def Set_attr(self, key: Any, value: Any) -> None:
        self._attributes[key] = value

    def Dup(self) -> Comm:
        return Comm(self._rank, self._size)

    def Set_errhandler(self, handler: Any) -> None:
        self.handler = handler

    Create_keyval, Is_inter = staticmethod(object), staticmethod(lambda: False)
    Ibarrier = staticmethod(lambda: SimpleNamespace(Test=lambda: True))


class FakeMpi(ModuleType):
    """``mpi4py.MPI`` in a world of ``size`` ranks."""

    Comm = Comm
    Exception = RuntimeError
    COMM_NULL = None
    THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
    ERRORS_RETURN = 1

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("mpi4py.MPI")
        self.COMM_WORLD = Comm(rank, size)
        self.finalized, self.initialized = False, True
        self.Is_finalized, self.Is_initialized = lambda: self.finalized, lambda: self.initialized

    def __hash__(self) -> int:
        return id(self)

    Query_thread, Get_library_version = staticmethod(lambda: 3), staticmethod(lambda: "Fake  MPI 1.0\nmore")


def install(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> FakeMpi:
    """Makes ``from mpi4py import MPI`` give a fake one."""
    mpi, package = FakeMpi(rank, size), ModuleType("mpi4py")
    package.MPI = mpi  # type: ignore[attr-defined]
    package.__spec__ = importlib.util.spec_from_loader("mpi4py", None)
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    monkeypatch.setattr(mpi_launch, "watch_exit", lambda module: None)
    return mpi


def find(environ: Mapping[str, str], comm: Any = None) -> Any:
    return detect_launch(environ, read_config(environ), comm)


@pytest.fixture
def no_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_launch, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        (HYDRA, 1),
        (OPEN_MPI, 1),
        (SRUN, 1),
        (HORORUN, 0),
        (TORCHRUN, 0),
        ({}, None),
        ({"RANK": "0"}, None),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, None),
    ],
)
def test_the_rank_is_known_before_anything_is_loaded(
    environ: dict[str, str], rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detect_module, "load_mpi", lambda why: pytest.fail("MPI was imported"))
    assert rank_of_launcher(environ) == rank


@pytest.mark.parametrize("environ", [HYDRA, OPEN_MPI, {"PMIX_RANK": "1"}, {"HOROVOD_CONTROLLER": "mpi"}])
def test_rank_and_size_come_from_mpi(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = install(monkeypatch, 1, 4)
    launch = find(environ)
    assert (launch.kind, launch.rank, launch.size, launch.mpi.threads_multiple) == ("mpi", 1, 4, True)
    assert launch.mpi.comm is not mpi.COMM_WORLD
    assert launch.mpi.comm.handler == mpi.ERRORS_RETURN
    assert find(environ) == launch  # the same communicator: its starts are counted together


def test_missing_mpi4py_under_mpirun_says_what_to_install_and_under_srun_slurm_decides(no_mpi4py: None) -> None:
    with pytest.raises(ResourceError, match=r"OMPI_COMM_WORLD_SIZE=4: .*not installed.*pip install mpi4py"):
        find(OPEN_MPI)
    with pytest.raises(ResourceError, match=r"HORO_CONTROLLER=mpi: .*pip install mpi4py"):
        find({"HORO_CONTROLLER": "mpi"})
    assert find(PMI2).kind == "slurm"


def test_whether_there_is_an_mpi_is_known_without_starting_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_launch, "mpi_importable", lambda: True)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    error = RuntimeError("cannot load MPI library\nlibmpi.so: no such file\nlibmpi.so.12: no such file")
    monkeypatch.setattr(mpi_launch, "find_spec", Mock(side_effect=error))
    said = "mpi4py finds no MPI library (cannot load MPI library; libmpi.so: no such file)"
    assert mpi_launch.why_no_mpi() == said
    monkeypatch.setattr(mpi_launch, "find_spec", lambda name: object())
    assert not mpi_launch.why_no_mpi()
    monkeypatch.setattr(mpi_launch, "mpi_importable", lambda: False)
    assert mpi_launch.why_no_mpi() == "needs mpi4py: pip install mpi4py"
    install(monkeypatch, 0, 1)
    assert not mpi_launch.why_no_mpi()


def test_mpi_that_is_over_or_has_not_begun_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = install(monkeypatch, 1, 4)
    mpi.initialized = False
    with pytest.raises(UsageError, match=r"call MPI.Init_thread\(MPI.THREAD_MULTIPLE\) before init\(\)"):
        find(HYDRA)
    mpi.finalized = True
    with pytest.raises(UsageError, match="MPI has been finalized in this process"):
        find(HYDRA)


PMI2 = {**SRUN, **HYDRA}
PMIX = {**SRUN, "PMIX_RANK": "1"}


DAEMON = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", **HYDRA}  # mpirun starts its daemons with srun, one for each node
KINDS = [
    ((1, 4), PMI2, "mpi"),
    ((1, 4), PMIX, "mpi"),
    ((0, 1), {"HORO_CONTROLLER": "mpi"}, "mpi"),
    *((None, environ, "none") for environ in ({}, {"OMPI_COMM_WORLD_SIZE": "1"}, {"PMI_SIZE": "many"})),
    (None, SRUN, "slurm"),
    *((None, {**OPEN_MPI, **SRUN, **HORORUN, "HORO_CONTROLLER": each}, "hororun") for each in ("auto", "gloo")),
    *((None, {**OPEN_MPI, **SRUN, **TORCHRUN, "HORO_CONTROLLER": each}, "torchrun") for each in ("auto", "gloo")),
    (None, {**PMI2, "HOROVOD_CONTROLLER": "slurm"}, "slurm"),
    (None, {**SRUN, "PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"}, "none"),  # a shell that srun has started
    (None, {**SRUN, "PMIX_RANK": "0", "SLURM_STEP_ID": "4294967290"}, "none"),
]


ALONE_TO_MPI = "but to mpi4py's MPI (Fake MPI 1.0) this is process 0 of 1"
REFUSED = [
    ((0, 1), HYDRA, f"PMI_SIZE=4, {ALONE_TO_MPI}"),
    ((0, 1), OPEN_MPI, f"OMPI_COMM_WORLD_SIZE=4, {ALONE_TO_MPI}"),
    ((0, 1), {"PMIX_RANK": "3"}, f"PMIX_RANK=3, {ALONE_TO_MPI}"),
    ((0, 3), PMI2, "PMI_SIZE=4 and Slurm count 4 processes, mpi4py's MPI counts 3"),
    ((0, 1), DAEMON, "the mpirun of another MPI"),
    ((0, 1), {**SRUN, **OPEN_MPI}, "the mpirun of another MPI"),
    ((0, 1), {**HORORUN, "HORO_CONTROLLER": "mpi"}, "to MPI this is a single process, while hororun started 2"),
    (None, {**OPEN_MPI, "HORO_CONTROLLER": "gloo"}, "OMPI_COMM_WORLD_SIZE=4 shows that MPI started this process"),
    (None, {**OPEN_MPI, "HORO_CONTROLLER": "slurm"}, "not one of several that srun started"),
    (None, {"HORO_CONTROLLER": "slurm"}, "not one of several that srun started"),
    (None, {"HORO_CONTROLLER": "hand"}, "HORO_CONTROLLER='hand' is not one of auto, mpi, gloo, slurm"),
]


@pytest.mark.parametrize(("mpi", "environ", "found"), [*KINDS, *REFUSED])
def test_the_launcher_that_is_found_or_what_cannot_be_is_one_sentence(
    mpi: tuple[int, int] | None, environ: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``mpi``: the rank and the size that it gives; None: it must not even be imported."""
    if mpi is None:
        monkeypatch.setattr(detect_module, "load_mpi", lambda why: pytest.fail("MPI was imported"))
    else:
        install(monkeypatch, *mpi)
    if " " not in found:
        assert find(environ).kind == found
        return
    with pytest.raises(UsageError) as caught:
        find(environ)
    assert found in str(caught.value)


@pytest.mark.parametrize("environ", [PMI2, PMIX])
def test_under_srun_a_lone_mpi_is_told_and_slurm_decides(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, 0, 1)
    launch = find(environ)
    assert (launch.kind, launch.rank, launch.size) == ("slurm", 1, 4)
    assert "each is alone to mpi4py's MPI (Fake MPI 1.0)" in caplog.text
    assert "HORO_CONTROLLER=slurm" in caplog.text


def test_a_communicator_decides_whatever_launcher_started_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 1, 4)
    some = Comm(0, 2)
    for environ in ({}, HYDRA, HORORUN):
        launch = find(environ, some)
        assert (launch.kind, launch.rank, launch.size) == ("mpi", 0, 2)
    with pytest.raises(UsageError, match="HORO_CONTROLLER=gloo rules MPI out"):
        find({"HORO_CONTROLLER": "gloo"}, some)


def test_an_argument_that_rules_a_launcher_out_is_named_as_one(no_mpi4py: None) -> None:
    for environ, controller, told in [
        ({}, "mpi", "mpi'): ranks that MPI starts need mpi4py"),
        ({}, "slurm", "slurm'), but this process is not one of several that srun started"),
        (OPEN_MPI, "gloo", "gloo'), but OMPI_COMM_WORLD_SIZE=4 shows that MPI started this process"),
    ]:
        with pytest.raises((UsageError, ResourceError)) as caught:
            detect_launch(environ, read_config(environ, {"controller": controller}))
        assert str(caught.value).startswith(f"init(controller='{told}")


@pytest.mark.parametrize("comm", [3, "01", b"01", {0: 1}, 1.5])
def test_what_is_no_comm_is_refused_with_its_type(comm: Any) -> None:
    with pytest.raises(UsageError, match=f"a list of ranks .* not a {type(comm).__name__}"):
        find({}, comm)


def test_a_list_of_ranks_picks_among_those_started() -> None:
    launch = find({**HORORUN, "HORO_SIZE": "4"}, [2, 0])
    assert (launch.kind, launch.rank, launch.size) == ("hororun", 1, 2)
    assert find({**SRUN, "HORO_SECRET": "ab" * 16}, (1,)).size == 1
    assert find({}, range(1)).size == 1


BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
ALONE = [
    (BATCH_SCRIPT, "start it with 'srun python train.py' or 'hororun train.py'"),
    (BATCH_SCRIPT | {"SLURM_STEP_ID": "4294967291"}, "start it with 'srun python train.py' or 'hororun train.py'"),
    (BATCH_SCRIPT | {"SLURM_PROCID": "2"}, "SLURM_STEP_ID has not reached it"),
]
NOT_ALONE_OR_ON_PURPOSE = [
    {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},  # the shell of salloc
    BATCH_SCRIPT | {"SLURM_STEP_ID": "4294967290"},  # the same, where Slurm runs it on a node
    BATCH_SCRIPT | {"SLURM_NTASKS": "1"},
    {key: value for key, value in BATCH_SCRIPT.items() if key != "SLURM_NTASKS"},
    BATCH_SCRIPT | {"SLURM_NTASKS": "x"},
    BATCH_SCRIPT | {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},  # srun -n 1
    BATCH_SCRIPT | HORORUN,
    BATCH_SCRIPT | TORCHRUN,
    SRUN | {"SLURM_NTASKS": "4"},
]


@pytest.mark.parametrize(("environ", "fact"), ALONE)
def test_a_process_alone_in_a_slurm_job_of_several_tasks_is_told_what_to_type(
    environ: dict[str, str], fact: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["code/train.py", "--epochs", "3"])
    assert detect_launch(environ, read_config(environ)).size == 1
    assert "this process is alone (size 1), but the Slurm job has 4 tasks (SLURM_NTASKS=4)" in caplog.text
    assert fact in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize("environ", NOT_ALONE_OR_ON_PURPOSE)
def test_who_is_not_alone_or_wants_to_be_is_not_told(environ: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    detect_launch(environ, read_config(environ))
    detect_launch(BATCH_SCRIPT, read_config(BATCH_SCRIPT), comm=[0])
    assert "alone" not in caplog.text


def test_missing_library_shows_what_mpi4py_said(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("mpi4py")
    package.__spec__ = importlib.util.spec_from_loader("mpi4py", None)
    error = RuntimeError("cannot load MPI library\nlibmpi.so: no such file")
    package.__getattr__ = Mock(side_effect=error)  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(ResourceError, match=r"cannot load MPI library; libmpi.so: no such file.*MPI4PY_LIBMPI="):
        find(HYDRA)
