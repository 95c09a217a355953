"""hororun: places ranks on hosts, starts them, forwards their output, ends them and says why.

Imports neither torch nor the native core, so that it starts fast (only ``--check-build`` looks for both).

    cli             command line -> Job
    options         the options of the command line, and which launcher each of them is for
    config          a job as frozen data
    command         the command of the ranks
    allocation      hosts and slots from a batch system
    hosts           -H and host files -> Host
    launcher        chooses a launcher if the command line does not
    candidates      the hosts that may get a rank
    placement       hosts, -np -> Slot
    environment     the variables of each rank
    preview         the output of --dry-run
    stdout          what hororun itself writes there
    check_hosts     the output of --check-hosts; reachability: who can connect to whom
    joining         which ranks have called init()
    launch_method   how an agent is started: launch_ssh and launch_slurm
    frames          messages between launcher and agent
    loop            files, signals and timers
    processes       starts, finds and ends processes; the guard
    binding         the CPUs of each rank
    ranks           the ranks of one host
    remote          the connection to the agent on one host
    agent           the remote side
    host_addresses  addresses between the hosts
    supervise       the whole job
    misuse          what a user may not have meant
    notes           what a rank says of its own end
    output          lines, prefixes, files
    report          endings -> root cause, text
    delegate        a job that mpirun or jsrun runs; launch_mpi and launch_jsrun make the commands
"""

from __future__ import annotations

__all__: list[str] = []
