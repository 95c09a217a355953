"""Starts the ranks of a job that an MPI has started, through mpi4py, which is imported only if MPI is needed.

The ranks get their numbers from MPI. ``MPI_Bcast`` sends the address and the secret of a store that rank 0 hosts to all
ranks. After that such a job starts like every other job.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from horo.bootstrap.auth.handshake import SECRET_BYTES
from horo.bootstrap.host.grouping import index_among
from horo.bootstrap.host.identity import read_identity
from horo.bootstrap.mpi.exit import watch_exit
from horo.bootstrap.net.addresses import Endpoint
from horo.bootstrap.net.interfaces import is_loopback
from horo.bootstrap.store.client import StoreClient
from horo.bootstrap.store.served import ServedStore, choose_server_addresses
from horo.bootstrap.store.server import StoreServer
from horo.config.table import Config, MpiVariables, read_variables, variables_of
from horo.errors import HoroError, PeerLostError, ResourceError, TimeoutError, UsageError

__all__ = [
    "MpiLauncherVariable",
    "MpiWorld",
    "check_world_size",
    "is_communicator",
    "library_of",
    "load_mpi",
    "mpi_importable",
    "open_mpi_store",
    "read_launcher_variable",
    "why_no_mpi",
    "world_of",
    "world_of_ranks",
]

_STORE_INFO_BYTES = 8192
"""Size of the message of rank 0 to all ranks: a few addresses and a secret, or the reason why there are none."""
_DIGEST_BYTES = 16
_LEVELS = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")
_POLL_FIRST_S = 0.0001
_POLL_LAST_S = 0.01


class MpiLauncherVariable(NamedTuple):
    """A variable that only the launcher of an MPI sets."""

    name: str
    value: str
    size: int | None
    """Processes in the job; None if the variable has no count."""
    rank: int | None

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


def read_launcher_variable(environ: Mapping[str, str]) -> MpiLauncherVariable | None:
    """The variable by which an MPI started this process as one of several; None if there is none."""
    said = read_variables(MpiVariables, environ)
    names = {field: variable.names[0] for field, variable in variables_of(MpiVariables).items()}
    for size, rank in (("ompi_size", "ompi_rank"), ("pmi_size", "pmi_rank")):
        value: str | None = getattr(said, size)
        count = _number(value)
        if value is not None and count is not None:
            return MpiLauncherVariable(names[size], value, count, _number(getattr(said, rank))) if count > 1 else None
    rank_alone = _number(said.pmix_rank)
    if said.pmix_rank is not None and rank_alone is not None:
        return MpiLauncherVariable(names["pmix_rank"], said.pmix_rank, None, rank_alone)
    return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def is_communicator(value: object) -> bool:
    """Whether it is a communicator of mpi4py; imports nothing."""
    return any(kind.__module__ == "mpi4py.MPI" and kind.__name__ == "Comm" for kind in type(value).__mro__)


def mpi_importable() -> bool:
    """Whether mpi4py is installed. Importing it would start MPI, and a wrong MPI may end the process."""
    try:
        return find_spec("mpi4py") is not None
    except (ImportError, ValueError):
        return False


def why_no_mpi() -> str:
    """The reason why ``mpi4py.MPI`` cannot be imported, if that is known without starting MPI, else empty."""
    if "mpi4py.MPI" in sys.modules:
        return ""
    if not mpi_importable():
        return "needs mpi4py: pip install mpi4py"
    try:
        found = find_spec("mpi4py.MPI")  # a mpi4py that is for every MPI looks for its library here
    except (ImportError, RuntimeError, OSError) as error:
        return f"mpi4py finds no MPI library ({'; '.join(str(error).splitlines()[:2])})"
    return "" if found else "this mpi4py has no module MPI"


def load_mpi(why: str) -> Any:
    """The module ``mpi4py.MPI``, in which MPI is running.

    Args:
        why: the reason why MPI is needed, for the start of a message.

    Raises:
        ResourceError: mpi4py is not installed or finds no MPI library.
        UsageError: MPI is already finalized or not yet initialized.
    """
    if not mpi_importable():
        raise ResourceError(
            f"{why}: ranks that MPI starts need mpi4py, which is not installed in this Python; pip install "
            "mpi4py, or start the job with hororun"
        )
    try:
        from mpi4py import MPI  # noqa: PLC0415 - starts MPI
    except (ImportError, RuntimeError, OSError) as error:
        said = "; ".join(str(error).splitlines()[:2])
        raise ResourceError(
            f"{why}: mpi4py is installed but finds no MPI library ({said}); point it at the library of the MPI that "
            f"starts the job: export MPI4PY_LIBMPI={_library_hint()}, or add its folder to LD_LIBRARY_PATH"
        ) from error
    if MPI.Is_finalized():
        raise UsageError(f"{why}: MPI has been finalized in this process; call init() before MPI.Finalize()")
    if not MPI.Is_initialized():
        raise UsageError(
            f"{why}: MPI is not initialized, since mpi4py.rc.initialize is False; call "
            "MPI.Init_thread(MPI.THREAD_MULTIPLE) before init()"
        )
    watch_exit(MPI)
    return MPI


def _library_hint() -> str:
    """Path of the library of the mpirun in PATH; a placeholder if it is not found."""
    mpirun = shutil.which("mpirun") or shutil.which("mpiexec")
    folder = Path(mpirun).parent.parent / "lib" if mpirun else None
    for library in sorted(folder.glob("libmpi.so*"), reverse=True) if folder is not None else ():
        with contextlib.suppress(OSError), library.open("rb") as file:
            if file.read(4) == b"\x7fELF":
                return str(library)
    return "/path/to/libmpi.so"


def check_world_size(mpi: Any, variable: MpiLauncherVariable) -> None:
    """Raises UsageError if MPI counts other processes than its launcher: then they are different MPIs."""
    size, rank = mpi.COMM_WORLD.Get_size(), mpi.COMM_WORLD.Get_rank()
    alone = variable.size is None and size == 1 and variable.rank
    if alone or (variable.size is not None and variable.size != size):
        raise UsageError(
            f"{variable}, but to mpi4py's MPI ({library_of(mpi)}) this is process {rank} of {size}: the job was "
            "started by the mpirun of another MPI; use the mpirun of that library, or point mpi4py at the launcher's: "
            f"export MPI4PY_LIBMPI={_library_hint()}"
        )


def library_of(mpi: Any) -> str:
    """Name and version of the MPI that mpi4py has loaded."""
    lines = str(mpi.Get_library_version()).replace("\0", "").strip().splitlines()
    return " ".join(lines[0].split(",")[0].split()) if lines else "an MPI without a name"


class MpiWorld:
    """A communicator of horo's own with the ranks of one job in their order; lives as long as the process.

    Attributes:
        mpi: the module ``mpi4py.MPI``.
        comm: the communicator; it returns errors.
        rank, size: rank and size in the communicator.
        library: name and version of the MPI.
        thread_level: MPI's name of the level, such as ``MPI_THREAD_MULTIPLE``.
        threads_multiple: whether MPI may be called from several threads at once.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self.mpi, self.comm = mpi, comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.library = library_of(mpi)
        level = mpi.Query_thread()
        self.thread_level = next(
            (name for name in _LEVELS if getattr(mpi, name.removeprefix("MPI_")) == level), str(level)
        )
        self.threads_multiple = bool(level == mpi.THREAD_MULTIPLE)
        self._arrival: Any = None

    def await_all(self, timeout_s: float) -> None:
        """Waits until all ranks have called this.

        Raises:
            TimeoutError: not all ranks did within ``timeout_s``.
        """
        self._arrival = self._arrival or self.comm.Ibarrier()
        _await(self._arrival, timeout_s, self.size)
        self._arrival = None

    def gather(self, value: bytes) -> list[bytes]:
        """The values of all ranks, which have equal length."""
        own, all_values = bytearray(value), bytearray(len(value) * self.size)
        self.comm.Allgather([own, self.mpi.BYTE], [all_values, self.mpi.BYTE])
        return [bytes(all_values[start : start + len(value)]) for start in range(0, len(all_values), len(value))]

    def broadcast(self, value: bytes) -> bytes:
        """The value of rank 0, at most ``_STORE_INFO_BYTES`` long."""
        info = bytearray(len(value).to_bytes(4, "big") + value.ljust(_STORE_INFO_BYTES, b"\0"))
        self.comm.Bcast([info, self.mpi.BYTE], 0)
        return bytes(info[4 : 4 + int.from_bytes(info[:4], "big")])


_worlds: dict[tuple[int, ...], MpiWorld] = {}
"""Worlds of lists of ranks. The world of a communicator is an MPI attribute of it, since handles are reused."""


def world_of(mpi: Any, comm: Any, timeout_s: float) -> MpiWorld:
    """horo's copy of a communicator, made at the first call. All its ranks must call this.

    Raises:
        UsageError: it is no communicator of this process within one group.
        TimeoutError: not all ranks called this within ``timeout_s``.
        PeerLostError: MPI failed.
    """
    if comm == mpi.COMM_NULL:
        raise UsageError(
            "init(comm=MPI.COMM_NULL): this process is not in the communicator, so it must not call init()"
        )
    if comm.Is_inter():
        raise UsageError("init(comm=...): an intercommunicator has two groups; merge them first (Intercomm.Merge)")
    keyval = _keyval(mpi)
    held = comm.Get_attr(keyval)
    if isinstance(held, MpiWorld):
        return held
    with _mpi_errors(mpi):
        arrival = held or comm.Ibarrier()
        comm.Set_attr(keyval, arrival)  # after a failure, the next call of this rank waits for the same barrier
        _await(arrival, timeout_s, comm.Get_size())
        world = _make_world(mpi, comm.Dup())
        comm.Set_attr(keyval, world)
    return world


@cache
def _keyval(mpi: Any) -> Any:
    return mpi.Comm.Create_keyval()


def world_of_ranks(mpi: Any, ranks: Sequence[Any], timeout_s: float) -> tuple[MpiWorld, tuple[int, ...]]:
    """A communicator of some ranks of ``COMM_WORLD``, in the order of the list, and that list.

    Raises:
        UsageError: as ``grouping.index_among``. PeerLostError: MPI failed.
    """
    base = mpi.COMM_WORLD
    _, chosen = index_among(ranks, base.Get_rank(), base.Get_size())
    if chosen not in _worlds:
        group = base.Get_group().Incl(list(chosen))
        with _mpi_errors(mpi), _ended_after(mpi, timeout_s, f"init(comm={list(chosen)})"):
            _worlds[chosen] = _make_world(mpi, base.Create_group(group))
    return _worlds[chosen], chosen


def _make_world(mpi: Any, comm: Any) -> MpiWorld:
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    return MpiWorld(mpi, comm)


@contextmanager
def _mpi_errors(mpi: Any) -> Iterator[None]:
    try:
        yield
    except mpi.Exception as error:
        raise PeerLostError(f"MPI failed during the start of the ranks: {error}") from error


@contextmanager
def _ended_after(mpi: Any, timeout_s: float, what: str) -> Iterator[None]:
    """Ends the job if MPI is not done in time, since MPI has no call with a deadline for this."""

    def end() -> None:
        logging.getLogger("horo").error(
            "%s: not all of these ranks came within %g s (HORO_START_TIMEOUT); ending the job through MPI_Abort",
            what,
            timeout_s,
        )
        mpi.COMM_WORLD.Abort(1)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _await(request: Any, timeout_s: float, size: int) -> None:
    deadline, pause_s = time.monotonic() + timeout_s, _POLL_FIRST_S
    while not request.Test():
        if time.monotonic() >= deadline:
            raise TimeoutError(
                f"not all {size} ranks of the communicator came within {timeout_s:g} s (HORO_START_TIMEOUT): does "
                "each of them call init()?"
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, _POLL_LAST_S)


def open_mpi_store(world: MpiWorld, config: Config) -> tuple[StoreClient, bytes]:
    """Opens the store that rank 0 hosts for this one start; MPI sends its address and a fresh secret to all ranks.

    Raises:
        TimeoutError: not all ranks called this in time. ResourceError: rank 0 has no address.
        PeerLostError: MPI failed.
    """
    timeout_s = config.start_timeout_s
    with _mpi_errors(world.mpi):
        world.await_all(timeout_s)
        machine = repr(read_identity(None).machine).encode()
        machines = world.gather(hashlib.sha256(machine).digest()[:_DIGEST_BYTES])
        if world.rank == 0:
            return _host(world, config, [other == machines[0] for other in machines])
        info = json.loads(world.broadcast(b""))
    if "error" in info:
        raise ResourceError(f"rank 0 cannot host the job's store: {info['error']}")
    endpoints = [Endpoint(address, port) for address, port in info["endpoints"]]
    near = machines[world.rank] == machines[0]
    first, *others = [endpoint for endpoint in endpoints if is_loopback(endpoint.address) == near]
    secret = bytes.fromhex(info["secret"])
    return StoreClient(*first, secret, timeout_s, others, served_by="rank 0"), secret


def _host(world: MpiWorld, config: Config, near: Sequence[bool]) -> tuple[StoreClient, bytes]:
    secret = secrets.token_bytes(SECRET_BYTES)
    try:
        told = config.told("network_interfaces")
        addresses = choose_server_addresses(config.network_interfaces, any(near[1:]), not all(near), told)
        server = StoreServer(
            addresses, secret, on_refused=logging.getLogger("horo").warning, ports=config.ports, clients=world.size
        )
    except HoroError as error:
        world.broadcast(json.dumps({"error": str(error)[: _STORE_INFO_BYTES // 2]}).encode())
        raise
    info = {"endpoints": server.endpoints, "secret": secret.hex()}
    try:
        world.broadcast(json.dumps(info).encode())
        return ServedStore(server, secret, world.size, config.start_timeout_s), secret
    except BaseException:
        server.close()
        raise
