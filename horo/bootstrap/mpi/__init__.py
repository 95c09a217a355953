"""Jobs that an MPI has started, through mpi4py."""
