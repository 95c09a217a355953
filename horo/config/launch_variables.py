"""The variables that tell a process its place in a job: those of hororun and of other launchers."""

from __future__ import annotations

from dataclasses import dataclass

from horo.config.variable import exact_variable, variable

__all__ = [
    "CallVariables",
    "HororunVariables",
    "LaunchVariables",
    "MpiVariables",
    "SlurmVariables",
    "TorchrunVariables",
]

_RANK = {"kind": int, "low": 0, "high": (1 << 31) - 1}
_COUNT = {"kind": int, "low": 1, "high": (1 << 31) - 1}


@dataclass(frozen=True)
class LaunchVariables:
    """The variables that hororun sets for each rank."""

    rank: int | None = variable("RANK", None, "Number of this process in the job.", **_RANK)
    size: int | None = variable("SIZE", None, "Processes in the job.", **_COUNT)
    local_rank: int | None = variable("LOCAL_RANK", None, "Number of this process on its host.", **_RANK)
    local_size: int | None = variable("LOCAL_SIZE", None, "Processes of the job on this host.", **_COUNT)
    cross_rank: int | None = variable(
        "CROSS_RANK", None, "Number of this host among those with a process of this local rank.", **_RANK
    )
    cross_size: int | None = variable("CROSS_SIZE", None, "Hosts that have a process of this local rank.", **_COUNT)
    hostname: str | None = variable("HOSTNAME", None, "This host's name as the user wrote it, for messages.", kind=str)
    store: str | None = exact_variable(
        "HORO_STORE",
        str,
        "Where the job meets: `ADDRESS:PORT`, or several of one store, comma-separated; addresses are numeric, IPv6 in "
        "brackets.",
    )
    secret: bytes | None = exact_variable(
        "HORO_SECRET",
        bytes,
        "The job's secret, which authenticates every connection; never put it on a command line. May be exported "
        "in a batch script for plain `srun` and `torchrun`, equal on all ranks.",
        low=16,
        secret=True,
    )
    job_id: str | None = exact_variable(
        "HORO_JOB_ID",
        str,
        "Name of the job, the namespace of its keys in the store.",
    )
    end_pipe: str | None = exact_variable(
        "HORO_END_PIPE",
        str,
        "Pipe to `hororun` on which this rank reports the error that ended it.",
    )
    counts_fd: str | None = exact_variable(
        "HORO_COUNTS_FD",
        str,
        "Memory shared with `hororun`, in which this rank counts its steps.",
    )
    worker: int | None = exact_variable(
        "HORO_WORKER",
        int,
        "In an elastic job: number of this process, which no other one ever has.",
        low=0,
        high=(1 << 31) - 1,
    )
    generation: int | None = exact_variable(
        "HORO_GENERATION",
        int,
        "In an elastic job: the first generation that may have this process.",
        low=1,
        high=(1 << 31) - 1,
    )
    commit_fd: str | None = exact_variable(
        "HORO_COMMIT_FD",
        str,
        "In an elastic job: memory for the commits of this process, which outlives it.",
    )
    host_commit_fd: str | None = exact_variable(
        "HORO_HOST_COMMIT_FD",
        str,
        "In an elastic job: the same for all processes of this host.",
    )
    elastic_dir: str | None = exact_variable(
        "HORO_ELASTIC_DIR",
        str,
        "`--elastic-dir`: folder in which `hvd.elastic.run` keeps the last commit of a job that ends before its "
        "training, and from which it goes on. Set it yourself under torchrun, srun and mpirun.",
    )
    config_sources: str | None = exact_variable(
        "HORO_CONFIG_SOURCES",
        str,
        "Which settings come from which options of `hororun` or from which file, for `hvd.config()`.",
    )
    rank_process: str | None = exact_variable(
        "HORO_RANK_PROCESS",
        str,
        "Set by `init()` in a rank's own process, for those that it starts: they have inherited its place, and "
        "their `init()` is refused.",
    )


@dataclass(frozen=True)
class HororunVariables:
    """The variables that hororun itself reads."""

    summary: bool | None = exact_variable(
        "HORO_SUMMARY",
        bool,
        "1: at the end of a job, `hororun` tells where the time of a step went, as by `--summary`; 0: never. Default: "
        "where stderr is a terminal.",
    )
    live: bool | None = exact_variable(
        "HORO_LIVE",
        bool,
        "1: `hororun` shows the course of a job while it runs, as by `--live`.",
    )


@dataclass(frozen=True)
class TorchrunVariables:
    """The variables that torchrun sets for each rank."""

    rank: int | None = exact_variable("RANK", int, "Number of this process in the job.", low=0, high=(1 << 31) - 1)
    world_size: int | None = exact_variable("WORLD_SIZE", int, "Processes in the job.", low=1, high=(1 << 31) - 1)
    local_rank: int | None = exact_variable("LOCAL_RANK", int, "Number of this process on its host.", low=0)
    local_world_size: int | None = exact_variable("LOCAL_WORLD_SIZE", int, "Processes of the job on this host.", low=1)
    group_rank: int | None = exact_variable("GROUP_RANK", int, "Number of this host's agent.", low=0)
    master_addr: str | None = exact_variable("MASTER_ADDR", str, "Host of torch's store.")
    master_port: int | None = exact_variable("MASTER_PORT", int, "Port of torch's store.", low=1, high=65535)
    run_id: str | None = exact_variable("TORCHELASTIC_RUN_ID", str, "Name of the job; part of the names of its keys.")
    restart_count: int | None = exact_variable(
        "TORCHELASTIC_RESTART_COUNT", int, "How often this agent has restarted its ranks after a failure.", low=0
    )
    use_agent_store: bool | None = exact_variable(
        "TORCHELASTIC_USE_AGENT_STORE", bool, "1 or `True`: the agent hosts torch's store; otherwise rank 0 does."
    )


@dataclass(frozen=True)
class MpiVariables:
    """The variables that the launcher of an MPI sets. Texts, so that stale values do not stop a lone process."""

    ompi_size: str | None = exact_variable("OMPI_COMM_WORLD_SIZE", str, "Processes, set by Open MPI's mpirun.")
    ompi_rank: str | None = exact_variable("OMPI_COMM_WORLD_RANK", str, "Number, set by Open MPI's mpirun.")
    pmi_size: str | None = exact_variable("PMI_SIZE", str, "Processes, set by MPICH, Intel MPI or `srun --mpi=pmi2`.")
    pmi_rank: str | None = exact_variable("PMI_RANK", str, "Number, set by MPICH, Intel MPI or `srun --mpi=pmi2`.")
    pmix_rank: str | None = exact_variable("PMIX_RANK", str, "Number, set by PRRTE or `srun --mpi=pmix`.")


@dataclass(frozen=True)
class SlurmVariables:
    """The variables that Slurm sets. Texts, since many are also set in processes that srun did not start."""

    job_id: str | None = exact_variable("SLURM_JOB_ID", str, "Number of the job; part of its name.")
    step_id: str | None = exact_variable("SLURM_STEP_ID", str, "Number of the step; part of the job's name.")
    restart_count: str | None = exact_variable("SLURM_RESTART_COUNT", str, "How often Slurm has started the job again.")
    procid: str | None = exact_variable("SLURM_PROCID", str, "Number of this process in the step.")
    step_num_tasks: str | None = exact_variable("SLURM_STEP_NUM_TASKS", str, "Processes in the step.")
    ntasks: str | None = exact_variable("SLURM_NTASKS", str, "Processes, if the variable before is missing.")
    localid: str | None = exact_variable("SLURM_LOCALID", str, "Number of this process on its node.")
    nodeid: str | None = exact_variable("SLURM_NODEID", str, "Number of this node in the step.")
    step_tasks_per_node: str | None = exact_variable(
        "SLURM_STEP_TASKS_PER_NODE", str, "Processes on each node: `2(x3),1`."
    )
    step_nodelist: str | None = exact_variable(
        "SLURM_STEP_NODELIST", str, "Nodes of the step; the first has process 0."
    )
    job_nodelist: str | None = exact_variable("SLURM_JOB_NODELIST", str, "Nodes, if the variable before is missing.")
    nodename: str | None = exact_variable("SLURMD_NODENAME", str, "Slurm's name of this node.")


@dataclass(frozen=True)
class CallVariables:
    """The variables that ``horo.run`` sets for each rank."""

    store: str | None = exact_variable("HORO_CALL_STORE", str, "Where the function is: `ADDRESS:PORT`, or several.")
    secret: bytes | None = exact_variable(
        "HORO_CALL_SECRET", bytes, "Authenticates the connection to it.", low=16, secret=True
    )
