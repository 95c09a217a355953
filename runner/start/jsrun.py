"""The jsrun command of an LSF job. Pure. Written by IBM's documentation of jsrun."""

from __future__ import annotations

import shlex

from horo.runner.config import Job, JobError

__all__ = ["jsrun_command"]


def jsrun_command(job: Job) -> list[str]:
    """One resource set per host, with all its cores and GPUs, and as many ranks in each.

    The hosts of such machines are given as a whole, and their slots count cores: ranks are spread, not filled in.

    Raises:
        JobError: the ranks cannot be spread evenly.
    """
    hosts = min(len(job.hosts), job.size)
    each, left = divmod(job.size, hosts)
    if left:
        raise JobError(
            f"-np {job.size}: jsrun starts as many ranks on each of the {hosts} hosts of the job: say a multiple of "
            f"{hosts}"
        )
    words = ["jsrun", "--nrs", str(hosts), "--rs_per_host", "1", "--tasks_per_rs", str(each)]
    words += ["--cpu_per_rs", "ALL_CPUS", "--gpu_per_rs", "ALL_GPUS"]
    words += ("--bind", "none") if job.mpi.binding is None else job.mpi.binding
    if job.output.directory is not None:
        words += [
            "--stdio_stdout",
            f"{job.output.directory}/stdout",
            "--stdio_stderr",
            f"{job.output.directory}/stderr",
        ]
    elif job.output.prefix:
        words += ["--stdio_mode", "prepended"]
    of_mpi = [*(["-tcp"] if job.mpi.tcp else []), *job.mpi.arguments]
    words += ["--smpiargs", shlex.join(of_mpi)] if of_mpi else []
    return [*words, *job.command]
