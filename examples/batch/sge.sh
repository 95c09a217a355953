#!/bin/bash
# Grid Engine (SGE, UGE, Open Grid Scheduler):  qsub examples/batch/sge.sh
#
# Change: the #$ lines (8 ranks here; `qconf -spl` lists the parallel environments of the site, in the place of mpi), the
# line that activates Python, and the last line.
#$ -N train
#$ -pe mpi 8
#$ -l h_rt=01:00:00
#$ -cwd
#$ -V
#$ -j y

# source /path/to/venv/bin/activate    # an environment with horo and torch, at the same path on all hosts
export OMP_NUM_THREADS=1    # cores per rank

# A rank for each slot of PE_HOSTFILE, started over ssh. For the site's MPI: mpirun -np "$NSLOTS" python train.py
hororun train.py
