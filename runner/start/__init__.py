"""The start of ranks elsewhere: allocations, and the commands of ssh, srun, mpirun and jsrun."""
