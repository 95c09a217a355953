"""How ranks are started elsewhere: allocations, and the commands of ssh, srun, mpirun and jsrun."""
