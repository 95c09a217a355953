#!/bin/bash
# LSF:  bsub < examples/batch/lsf.sh
#
# Change: the #BSUB lines (8 ranks, 4 on each host here; add -q and -P where the site wants them), the line that activates
# Python, and the last line.
#BSUB -J train
#BSUB -n 8
#BSUB -R "span[ptile=4]"
#BSUB -W 1:00
#BSUB -o train-%J.out

# source /path/to/venv/bin/activate    # an environment with horo and torch, at the same path on all hosts
export OMP_NUM_THREADS=1    # cores per rank

# A rank for each slot, started over ssh, or by jsrun on machines that have it. For the site's MPI: mpirun python train.py
hororun train.py
