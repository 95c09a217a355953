"""hororun: places ranks on hosts, starts them, forwards their output, ends them and says why.

Imports neither torch nor the native core, so that it answers at once (``--check-build`` alone looks at both).

    cli          command line -> Job                options     what may stand there, and for which launcher
    config       what a job is, as frozen data      allocation  what a batch system has given
    hosts        -H and host files -> Host          launcher    which launcher, when nobody says
    placement    hosts, -np -> Slot                 candidates  which hosts may get a rank
    environment  what every rank finds              preview     what --dry-run shows
    output       lines, prefixes, files             report      endings -> root cause, text
    ways         how an agent is started: launch_ssh and launch_slurm
    frames       messages between launcher and agent
    loop         files, signals and timers          processes   starts, finds and ends processes; the guard
    ranks        the ranks of one host              remote      one host at the end of one ssh or srun
    supervise    the whole job                      agent       the remote side
    delegate     a job in the hands of mpirun or jsrun, whose commands launch_mpi and launch_jsrun write
"""

from __future__ import annotations

__all__: list[str] = []
