"""hororun: places ranks on hosts, starts them, forwards their output, ends them and says why.

Imports neither torch nor the native core, so that it answers at once (``--check-build`` alone looks at both).

    cli        command line -> Options            hosts      -H and host files -> Host
    config     what a job is, as frozen data      placement  hosts, -np -> Slot
    environment  what every rank finds            output     lines, prefixes, files
    report     endings -> root cause, text        launch_ssh the ssh command and what its failures mean
    frames     messages between launcher and agent
    loop       files, signals and timers          processes  starts, finds and ends processes; the guard
    ranks      the ranks of one host              remote     one host at the end of one ssh
    supervise  the whole job                      agent      the remote side
"""

from __future__ import annotations

__all__: list[str] = []
