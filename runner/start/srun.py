"""The srun command for a remote host of a Slurm job, and the explanation of its failure. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from horo.runner.config import EXIT_UNREACHABLE, JobError
from horo.runner.hosts import HostSpec
from horo.runner.start.remote_launcher import agent_command, explain_agent, lines_of

__all__ = ["SrunLauncher", "knows_overlap"]

_OVERLAP_SINCE = (20, 11)
_ABOUT_A_STEP = (
    "SLURM_STEP*",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_GTIDS",
    "SLURM_TASK_PID",
    "SLURM_CPU_BIND*",
    "SLURM_DISTRIBUTION",
    "SLURM_LAUNCH_NODE_IPADDR",
    "SLURM_SRUN_COMM_*",
    "SLURM_MPI_TYPE",
    "SLURM_PRIO_PROCESS",
    "SLURM_UMASK",
)
_SAME_NAME_FOR_A_STEP = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER_NODE", "SLURM_NNODES", "SLURM_NODELIST")
_ABOUT_A_HOST = ("SLURM_CPUS_ON_NODE", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_TOPOLOGY_*")
_FOR_SRUN = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_WORKING_CLUSTER")
_NOT_FOR_SRUN = ("SLURM_*", "SRUN_*", "SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY", "CUDA_VISIBLE_DEVICES")

_REMARKS = ("lacks support for cpu binding", "queued and waiting for resources", "has been allocated resources")
"""Parts of messages that srun also writes about steps that run well."""


@dataclass(frozen=True)
class SrunLauncher:
    """A ``RemoteLauncher``: one step of one task per host, beside the steps that run in the job already.

    Attributes:
        python: the Python on the hosts.
        program: the srun program.
        overlap: whether this Slurm knows ``--overlap``; before, steps shared their resources unasked.
    """

    python: str
    program: str = "srun"
    overlap: bool = True
    name: str = "srun"
    ends_on_sigterm: bool = True
    unset: tuple[str, ...] = (*_ABOUT_A_STEP, *_SAME_NAME_FOR_A_STEP, "SRUN_*", "PMI_*", "PMI2_*", "PMIX_*")

    def command(self, host: HostSpec) -> list[str]:
        """See ``RemoteLauncher``.

        The step must give its one task all that the job has on the host: every core, all memory, all GPUs.
        ``--unbuffered`` is left out on purpose, since it puts a terminal between; messages end in a newline instead.
        """
        options = [
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={host.name}",
            *(["--overlap"] if self.overlap else []),
            "--cpu-bind=none",
            "--mem=0",
            "--kill-on-bad-exit=0",
            "--mpi=none",
            "--export=ALL",
            "--chdir=/",
            "--quiet",
        ]
        return [self.program, *options, "sh", "-c", agent_command(self.python)]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """See ``RemoteLauncher``. srun takes many options from variables that were meant for the job."""
        return {
            name: value for name, value in environ.items() if name in _FOR_SRUN or not _matches(name, _NOT_FOR_SRUN)
        }

    def extra_variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """See ``RemoteLauncher``: the variables of the Slurm job, so that they are equal on every host."""
        return {
            name: value
            for name, value in environ.items()
            if name.startswith("SLURM_") and not _matches(name, (*_ABOUT_A_STEP, *_ABOUT_A_HOST))
        }

    def trial_command(self, host: str) -> str:
        """See ``RemoteLauncher``."""
        return f"srun --overlap --nodelist={host} hostname"

    def cause(self, lines: Sequence[str]) -> str:
        """See ``RemoteLauncher``: Slurm's first error, else the agent's last line, else srun's line about the end
        of the task, else srun's last line."""
        own, others, end = _sorted(lines)
        errors = [line for line in own if re.search(r": (error|fatal): ", line)]
        found = errors[:1] or others[-1:] or end or own[-1:]
        return found[0] if found else ""

    def explain_failure(self, host: str, code: int, stderr: bytes) -> JobError:
        """See ``RemoteLauncher``."""
        lines = lines_of(stderr)
        own, others, _ = _sorted(lines)
        if own and not others:
            said = re.sub(r"^srun: (error: |fatal: )?", "", self.cause(lines))
            return JobError(f"cannot start an agent on host {host}: srun: {said}", EXIT_UNREACHABLE)
        return explain_agent(host, self.python, code, others[-1] if others else f"no message, exit code {code}")


def knows_overlap(version: str) -> bool:
    """Whether srun knows ``--overlap``, by ``srun --version``, like ``slurm 22.05.8``; anything else counts as new."""
    found = re.search(r"slurm\S* ([0-9]+)\.([0-9]+)", version)
    return found is None or (int(found[1]), int(found[2])) >= _OVERLAP_SINCE


def _sorted(lines: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The lines of Slurm, those of others, and srun's lines about the end of its task; harmless ones are left out."""
    said = [line for line in lines if not any(remark in line for remark in _REMARKS)]
    by_slurm = [line for line in said if re.match(r"(srun|slurmstepd)[:-]", line)]
    end = [line for line in by_slurm if "task 0:" in line]
    return [line for line in by_slurm if line not in end], [line for line in said if line not in by_slurm], end


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
