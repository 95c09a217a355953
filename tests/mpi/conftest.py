"""What runs under mpirun: `mpirun -np 4 python -m pytest --with-mpi tests/mpi`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "native"))  # ranks.py
