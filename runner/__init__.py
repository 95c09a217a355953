"""hororun: places ranks on hosts, starts them, forwards their output, ends them and says why.

Imports neither torch nor the native core, so that it starts fast (only ``--check-build`` looks for both).

    cli/                     the command line
        entry                command line -> Job
        options              the options, and which launcher each of them is for
        tuning               the variables that options stand for
        dry_run              the output of --dry-run
        check_hosts          the output of --check-hosts
        check_build          the output of --check-build
    job/                     a whole job
        placement            hosts, -np -> the hosts that may get a rank, Placement
        environment          the variables of each rank
        host_addresses       addresses between the hosts
        supervise            starts the ranks, watches and ends them
        external_launcher    the same for a job that mpirun or jsrun runs
        remote               the connection to the agent on one host
        joining              which ranks have called init()
        console, output      lines, prefixes
        rank_files           the files of the ranks
        report               endings -> root cause, text
        misuse               likely mistakes of a user
    start/                   how ranks are started elsewhere
        allocation           hosts and slots from a batch system
        launcher             chooses a launcher if the command line does not
        remote_launcher      how an agent is started: ssh, srun
        mpirun, jsrun        commands that start all ranks
    agent/                   one host
        __main__             the agent
        messages             between hororun and the agent
        checks               what an agent says, checked where it comes in
        ranks                the ranks of one host
        command              the command of the ranks
        binding              the CPUs of each rank
        machine              cores, GPUs
        notes                notes of a rank on its own end
    config                   a job as frozen data
    hosts                    -H and host files -> Host
    loop                     files, signals and timers
    own_modules              hororun imports nothing from the current directory
    network                  addresses and ports of this machine; who can connect to whom
    printable                text from elsewhere in hororun's own lines
    processes                starts, finds and ends processes; the guard
    stdout                   what hororun itself writes there
"""

from __future__ import annotations

__all__: list[str] = []
