#!/bin/bash
# PBS Professional, OpenPBS and Torque:  qsub examples/batch/pbs.sh
#
# Change: the #PBS lines (2 nodes with 4 ranks each here; Torque writes -l nodes=2:ppn=4 instead; add -q and -A where the
# site wants them), the line that activates Python, and the last line.
#PBS -N train
#PBS -l select=2:ncpus=4:mpiprocs=4
#PBS -l walltime=01:00:00
#PBS -j oe

cd "$PBS_O_WORKDIR" || exit
# source /path/to/venv/bin/activate    # an environment with horo and torch, at the same path on all nodes
export OMP_NUM_THREADS=1    # cores per rank: ncpus / mpiprocs

# A rank for each line of PBS_NODEFILE, started over ssh. Where ssh between nodes is not allowed, and for the site's MPI and
# its network: mpirun python train.py (the MPI must have been built for PBS).
hororun train.py
