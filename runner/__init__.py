"""hororun: places ranks on hosts, starts them, forwards their output, ends them and reports the cause.

Imports neither torch nor the native core, so that it starts fast (only ``--check-build`` looks for both).

    cli/                     the command line
        entry                command line -> Job
        options              the options
        combinations         options that have no effect together
        tuning               the variables that options stand for
        config_file          options from a YAML file
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
        arrivals             the ranks that have called init()
        console, output      lines, prefixes
        rank_files           the files of the ranks
        report               endings -> root cause, text
        signals              signals to hororun and its agents -> ranks
        timelines            merges the timelines of the ranks
    start/                   how ranks are started elsewhere
        allocation           hosts and slots from a batch system
        launcher             chooses a launcher if the command line does not
        remote_launcher      how an agent is started: ssh, srun
        mpirun               commands that start all ranks: mpirun, jsrun
    agent/                   one host
        __main__             the agent
        messages             between hororun and the agent
        checks               checks of the messages of an agent
        ranks                the ranks of one host
        command              the command of the ranks
        machine              cores, NUMA nodes, GPUs; the CPUs of each rank
        notes                notes of a rank on its own end
    call/                    horo.run: a function in every rank
        parent               the caller: hororun, results, exceptions
        __main__             a rank
        values               the objects that go between them
    config                   a job as frozen data
    hosts                    -H and host files -> HostSpec
    loop                     files, signals and timers
    network                  addresses and ports of this machine; connections between hosts
    printable                text from elsewhere in hororun's own lines
    processes                starts, finds and ends processes; the guard
    stdout                   hororun's own text on stdout
"""

from __future__ import annotations

__all__: list[str] = []
