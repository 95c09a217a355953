"""Runs a whole job, from the hosts of its user to the exit code of hororun."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from horo.runner.config import Job, JobError
from horo.runner.job.host_addresses import check_interfaces
from horo.runner.job.json_report import check_report
from horo.runner.job.placement import candidates, remote_launcher_of
from horo.runner.job.supervise import Supervisor
from horo.runner.loop import Loop
from horo.runner.processes import (
    Guard,
    become_subreaper,
    children_of_this_process,
    occupy_standard_streams,
    raise_descriptor_limit,
)

__all__ = ["run_job"]


def run_job(job: Job, environment: Mapping[str, str], kind: type[Supervisor] | None = None) -> int:
    """Runs the job to its end, in the main thread.

    Args:
        job: what to run.
        environment: of hororun.
        kind: what decides about it; None: a rank that fails ends the job.

    Returns:
        hororun's exit code: 0, the code of the rank that failed first (128 + n for a signal), or what was wrong
        before any rank ran (see ``docs/reference/hororun.md``).

    Raises:
        JobError: nothing could be started at all.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise JobError("the current directory does not exist any more: ranks would start in it") from None
    if job.json_report:
        check_report(job.json_report)
    check_interfaces(job.interfaces)
    hosts = candidates(job, environment)
    launcher = remote_launcher_of(job, environment)
    occupy_standard_streams()
    spared = children_of_this_process()  # a shell that became us by ``exec`` may have left some
    guard = Guard()  # forked before the first thread
    become_subreaper()
    raise_descriptor_limit()
    with closing(Loop()) as loop:
        kind = kind or Supervisor
        code = kind(job, hosts, launcher, environment, loop, guard=guard, spared=spared | {guard.pid}).run()
    guard.dismiss()  # not when something went wrong in here: then it has work to do
    return code
