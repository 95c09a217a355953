"""A real Slurm on the hosts of a cluster: Debian's controller and node daemons, on every host with a munged of its own.

The network namespaces keep Slurm's ports apart from every other run's, and ``/run`` of each host the sockets. Slurm
believes that each host has ``CPUS`` cores, whatever the machine has.
"""

import os
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs import DEADLINE_S, TORCH_S, Launched, wait_until
from namespaces import Cluster, ClusterHost
from skips import apt_install

CPUS = 4
"""Of each host."""
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
_PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
# No accounting, no control groups, no waiting between the end of one job and the start of the next.
_CONFIG = """
ClusterName=horo
SlurmctldHost={first.name}({first.address})
AuthType=auth/munge
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=/run/slurm
SlurmdSpoolDir=/run/slurm
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/run/slurm/slurmctld.log
SlurmdLogFile=/run/slurm/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
KillWait=2
FirstJobId={first_job}
{nodes}
PartitionName=all Nodes=ALL Default=YES
"""
_NODE = "NodeName={host.name} NodeAddr={host.address} CPUs={cpus}"
_CGROUP_CONFIG = """
CgroupPlugin=cgroup/v1
CgroupAutomount=no
ConstrainCores=no
"""
_ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
_LOOK_S = 0.1
"""Between two looks at Slurm's state: each is a process or two."""
# The default, /tmp, is the same folder on all hosts here.
_MPI_CONFIG = "PMIxCliTmpDirBase=/run/slurm\n"
_MUNGED = ["munged", "--force", *(f"--{name}-file=/run/munge/{name}" for name in ("key", "log", "pid", "seed"))]


@dataclass(frozen=True)
class BatchJob:
    """How a batch job has ended."""

    number: int
    state: str
    """``COMPLETED``, ``FAILED``, ``CANCELLED``..."""
    exit_code: str
    """``CODE:SIGNAL``, as Slurm writes it."""
    output: str
    """What it wrote, stdout and stderr."""


@dataclass
class Slurm:
    """Commands of Slurm, run on the first host."""

    cluster: Cluster

    def start(self, *words: str, environment: Mapping[str, str] | None = None) -> Launched:
        """Starts a command, such as ``srun``; what it starts, on whatever host, carries its mark."""
        told = {**self._environment(), **(environment or {})}
        return self.cluster.start_on(self.cluster.hosts[0], words, environment=told)

    def run(self, *words: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs it to its end."""
        return self.start(*words, environment=environment).finish()

    def queue(self, folder: Path, *words: str, environment: Mapping[str, str] | None = None) -> tuple[int, Launched]:
        """Runs ``sbatch words``; the job begins and writes in ``folder``. Returns its number and what finds it."""
        command = ["sbatch", "--parsable", f"--chdir={folder}", f"--output={folder}/%j.out", *words]
        launched = self.start(*command, environment=environment)
        out, err = launched.process.communicate(timeout=DEADLINE_S)
        if launched.process.returncode:
            raise AssertionError(f"{' '.join(command)}: {err.decode()}")
        return int(out), launched

    def finish(self, number: int, launched: Launched) -> BatchJob:
        """Waits for the end of a job that was queued; nothing of it may be left then."""

        def has_ended() -> bool:
            return self.facts(number)["JobState"] in _ENDED

        wait_until(has_ended, f"job {number} has ended", every_s=_LOOK_S, deadline_s=TORCH_S)
        launched.nothing_is_left()
        facts = self.facts(number)
        return BatchJob(number, facts["JobState"], facts["ExitCode"], Path(facts["StdOut"]).read_text())

    def batch(self, folder: Path, *words: str, environment: Mapping[str, str] | None = None) -> BatchJob:
        """``queue`` and ``finish``."""
        return self.finish(*self.queue(folder, *words, environment=environment))

    def facts(self, number: int) -> dict[str, str]:
        """What Slurm knows about a job."""
        words = self._ask("scontrol", "--oneliner", "show", "job", str(number)).split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def clean_up(self) -> None:
        """Ends whatever a test that failed has left; waits until all cores are free again."""
        self._ask("scancel", "--full", "--signal=KILL", "--user=root")
        self._ask("scancel", "--user=root")
        self.cluster.clean_up()
        wait_until(self.is_idle, "all hosts are idle", every_s=_LOOK_S)

    def is_idle(self) -> bool:
        """Whether all hosts are up and run nothing."""
        words = ["sinfo", "--noheader", "--Node", "--format=%T"]
        done = self.cluster.run_on(self.cluster.hosts[0], words, self._environment())
        return done.stdout.split() == ["idle"] * len(self.cluster.hosts)

    def on(self, host: ClusterHost, words: Sequence[str]) -> str:
        """Runs a program of Slurm on a host to its end; returns what it writes."""
        done = self.cluster.run_on(host, words, self._environment())
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} on {host.name}: {done.stderr.strip()}")
        return done.stdout

    def _ask(self, *words: str) -> str:
        return self.on(self.cluster.hosts[0], words)

    def _environment(self) -> dict[str, str]:
        folder = self.cluster.folder
        return {"SLURM_CONF": str(folder / "slurm.conf"), "TMPDIR": str(folder / "tmp"), "PATH": _PATH}


def why_no_slurm() -> str:
    """Why there can be no Slurm on the hosts of a cluster; empty: there can."""
    return apt_install(_PROGRAMS, _PATH)


def make_slurm(cluster: Cluster) -> Slurm:
    """Starts Slurm; the end of the cluster ends it."""
    nodes = "\n".join(_NODE.format(host=host, cpus=CPUS) for host in cluster.hosts)
    # MPICH names what it leaves on the machine by the number of the job, and two runs may be here at once.
    config = _CONFIG.format(first=cluster.hosts[0], first_job=os.getpid() % 60_000 * 1000 + 1, nodes=nodes)
    (cluster.folder / "slurm.conf").write_text(config)
    (cluster.folder / "cgroup.conf").write_text(_CGROUP_CONFIG)
    (cluster.folder / "mpi.conf").write_text(_MPI_CONFIG)
    slurm = Slurm(cluster)
    key = secrets.token_bytes(128)
    for host in cluster.hosts:
        run = cluster.run_folder(host)
        (run / "slurm").mkdir()
        (run / "munge").mkdir()
        (run / "munge" / "key").write_bytes(key)
        (run / "munge" / "key").chmod(0o600)
        slurm.on(host, _MUNGED)
    slurm.on(cluster.hosts[0], ["slurmctld", "-c"])
    for host in cluster.hosts:
        slurm.on(host, ["slurmd", "-c", "-N", host.name])
    wait_until(slurm.is_idle, f"Slurm's hosts are idle, see {cluster.folder}/*.run/slurm/*.log", every_s=_LOOK_S)
    return slurm
