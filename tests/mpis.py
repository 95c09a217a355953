"""Where the MPIs of ``make test-mpi`` are, and how each starts ranks on several hosts."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

_BUILT = Path(__file__).parents[1] / "build" / "mpi"
# Slots are what -H says, not the cores of the machine that plays all hosts; mpirun refuses root unless told twice.
_OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
}


@dataclass(frozen=True)
class Mpi:
    """One MPI, as ``pip install`` brings it.

    Attributes:
        name: of its package and folder.
        library: how its version begins.
        starter: its program that starts ranks.
        under_srun: the ``--mpi`` by which ``srun`` starts its ranks.
        cyclic: options of the starter that place ranks on hosts in turn.
        hosts: the option of the starter that names them.
        pass_on: the option of the starter that gives a variable to other hosts, where it does not give all.
        variables: that every job here needs.
    """

    name: str
    library: str
    starter: str
    under_srun: str
    cyclic: tuple[str, ...]
    hosts: str
    pass_on: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def prefix(self) -> Path:
        """Where it is installed."""
        return _BUILT / self.name

    @property
    def environment(self) -> dict[str, str]:
        """Leads programs and mpi4py to it, and ``python`` to the one that runs the tests; MPI must carry the data."""
        path = f"{self.prefix}/bin:{os.environ['PATH']}"
        venv = Path(sys.executable).parent
        own = {"LD_LIBRARY_PATH": f"{self.prefix}/lib", "PATH": f"{venv}:{path}", "HORO_TRANSPORT": "mpi"}
        return {**own, **self.variables}


MPIS = {
    mpi.name: mpi
    for mpi in (
        Mpi("openmpi", "Open", "mpirun", "pmix", ("--map-by", "node"), "-H", "-x", variables=_OPENMPI),
        Mpi("mpich", "MPICH", "mpiexec", "pmi2", ("-ppn", "1"), "-hosts"),
    )
}


def why_no_mpi(mpi: Mpi) -> str:
    """Why it cannot be used; empty: it can."""
    unavailable = mpi.prefix / "unavailable"
    if unavailable.exists():
        return unavailable.read_text().strip()
    if not (mpi.prefix / "bin" / mpi.starter).exists():
        return f"{mpi.prefix.relative_to(_BUILT.parents[1])} is not there (`make test-mpi` makes it)"
    return "" if find_spec("mpi4py") else "mpi4py is not installed"
