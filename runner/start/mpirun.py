"""The command that starts all ranks by mpirun, for each family of MPI, or by jsrun. Pure.

Variables go by name only: their values are in mpirun's own environment, never on a command line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from horo.runner.config import EXIT_SETUP, Job, JobError
from horo.runner.hosts import HostSpec, is_host_name

__all__ = ["Family", "Mpirun", "family_of", "forwarded_names", "jsrun_command", "mpirun_command", "mpirun_variables"]


class Family(Enum):
    """The mpiruns with the same options."""

    OPEN_MPI_5 = "Open MPI 5"  # PRRTE starts the ranks
    OPEN_MPI_4 = "Open MPI 4"  # ORTE does
    SPECTRUM = "Spectrum MPI"  # made of Open MPI
    MPICH = "MPICH"  # Hydra: MPICH, MVAPICH
    INTEL = "Intel MPI"  # a Hydra of its own


@dataclass(frozen=True)
class Mpirun:
    """A program that starts MPI ranks.

    Attributes:
        path: its absolute path, by which Open MPI finds itself on other hosts.
        family: the one whose options it knows.
    """

    path: str
    family: Family


def family_of(path: str, version: str) -> Family:
    """The family of an MPI, by the output of ``mpirun --version``.

    Raises:
        JobError: it is of no family that hororun knows.
    """
    if "Spectrum MPI" in version:
        return Family.SPECTRUM
    found = re.search(r"\((?:Open MPI|OpenRTE)\) ([0-9]+)", version)
    if found is not None:
        return Family.OPEN_MPI_5 if int(found[1]) >= 5 else Family.OPEN_MPI_4
    if "Intel(R) MPI" in version:
        return Family.INTEL
    if "HYDRA" in version:
        return Family.MPICH
    said = next((line.strip() for line in version.splitlines() if line.strip()), "nothing")
    raise JobError(
        f"{path} is of no kind that hororun knows (Open MPI, Spectrum MPI, MPICH, MVAPICH, Intel MPI); its --version "
        f"says: {said}. Start the ranks with it yourself, '{path} -n 4 python train.py', or name another with --mpirun",
        EXIT_SETUP,
    )


def mpirun_command(
    job: Job, mpirun: Mpirun, counts: Mapping[str, int], names: Sequence[str], *, root: bool
) -> list[str]:
    """The whole command.

    Args:
        job: the job as the user wants it.
        mpirun: the program that starts the ranks.
        counts: ranks per host, in order.
        names: variables to pass on.
        root: whether the user is root; Open MPI refuses root without an option.

    Raises:
        JobError: this mpirun has no words for an option; names it.
    """
    _check(job, mpirun.family)
    if mpirun.family is Family.INTEL:
        return _intel(job, mpirun, counts, names)
    if mpirun.family is Family.MPICH:
        return _mpich(job, mpirun, counts, names)
    return _open_mpi(job, mpirun, counts, names, root=root)


def jsrun_command(job: Job) -> list[str]:
    """The jsrun command of an LSF job, by IBM's documentation: one resource set per host, with all its cores and GPUs.

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


def mpirun_variables(job: Job, family: Family) -> dict[str, str]:
    """Variables by which this mpirun takes options that it has no words for."""
    ssh = " ".join(_ssh_words(job))
    if family is Family.MPICH:
        return {"HYDRA_LAUNCHER_EXTRA_ARGS": ssh} if ssh else {}
    if family is Family.INTEL:
        pinning = {"I_MPI_PIN": "0"} if job.mpi.binding is None else {}
        return pinning | ({"I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": ssh} if ssh else {})
    return {}


def forwarded_names(family: Family) -> tuple[str, ...]:
    """Patterns of variables that tune this MPI, and mpi4py, and that mpirun does not pass on by itself."""
    hydra = family in (Family.MPICH, Family.INTEL)
    return ("MPI4PY_*", *(("MPICH_*", "MPIR_*", "MV2_*", "I_MPI_*") if hydra else ()))


def _open_mpi(job: Job, mpirun: Mpirun, counts: Mapping[str, int], names: Sequence[str], *, root: bool) -> list[str]:
    new = mpirun.family is Family.OPEN_MPI_5
    slot = "slot:OVERSUBSCRIBE" if job.oversubscribe else "slot"
    binding = ("--bind-to", "none", "--map-by", slot) if job.mpi.binding is None else job.mpi.binding
    words = [mpirun.path, *(["--allow-run-as-root"] if root else []), "-np", str(job.size), "-H", _with_counts(counts)]
    words += binding
    ssh = _ssh_words(job)
    launcher = ("--prtemca", "plm_ssh") if new else ("--mca", "plm_rsh")
    if job.ssh.program != "ssh":
        words += [launcher[0], f"{launcher[1]}_agent", job.ssh.program]
    if ssh:
        words += [launcher[0], f"{launcher[1]}_args", " ".join(ssh)]
    if job.interfaces:
        between_daemons = ("--prtemca", "prte_if_include") if new else ("--mca", "oob_tcp_if_include")
        interfaces = ",".join(job.interfaces)
        words += ["--mca", "btl_tcp_if_include", interfaces, *between_daemons, interfaces]
    words += _open_mpi_output(job, new=new)
    if job.mpi.tcp:
        words.append("-tcp")
    for name in names:
        words += ["-x", name]
    return [*words, *job.mpi.arguments, *job.command]


def _open_mpi_output(job: Job, *, new: bool) -> list[str]:
    output = job.output
    if not new:
        words = ["--tag-output"] if output.prefix else []
        words += ["--timestamp-output"] if output.timestamp else []
        return [*words, *(["--output-filename", output.directory] if output.directory is not None else [])]
    parts = ["tag"] if output.prefix else []
    parts += ["timestamp"] if output.timestamp else []
    # Not dir=: Open MPI 5.0 loses one of the two streams of a rank there.
    parts += [f"file={output.directory}/rank"] if output.directory is not None else []
    return ["--output", ",".join(parts)] if parts else []


def _mpich(job: Job, mpirun: Mpirun, counts: Mapping[str, int], names: Sequence[str]) -> list[str]:
    if job.output.timestamp:
        raise JobError("--prefix-timestamp: the mpirun of MPICH knows no times: leave it out")
    binding = ("-bind-to", "none") if job.mpi.binding is None else job.mpi.binding
    words = [mpirun.path, "-np", str(job.size), "-hosts", _with_counts(counts), *binding]
    return [*words, *_hydra(job, names), *job.mpi.arguments, *job.command]


def _intel(job: Job, mpirun: Mpirun, counts: Mapping[str, int], names: Sequence[str]) -> list[str]:
    words = [mpirun.path, *(["-prepend-timestamp"] if job.output.timestamp else []), *_hydra(job, names)]
    words += job.mpi.binding or ()
    if len(set(counts.values())) == 1:
        each = next(iter(counts.values()))
        words += ["-n", str(job.size), "-ppn", str(each), "-hosts", ",".join(counts)]
        return [*words, *job.mpi.arguments, *job.command]
    if ":" in job.command:
        raise JobError("the command has a word ':', at which Intel MPI would cut it; give all hosts as many ranks")
    words += job.mpi.arguments
    for index, (name, count) in enumerate(counts.items()):
        words += [*([":"] if index else []), "-n", str(count), "-host", name, *job.command]
    return words


def _hydra(job: Job, names: Sequence[str]) -> list[str]:
    """The words that are common to the Hydras of MPICH and Intel."""
    words = []
    if _ssh_words(job) or job.ssh.program != "ssh":
        words += ["-launcher", "ssh"]
    if job.ssh.program != "ssh":
        words += ["-launcher-exec", job.ssh.program]
    if job.interfaces:
        words += ["-iface", job.interfaces[0]]
    if job.output.prefix:
        words.append("-prepend-rank")
    if job.output.directory is not None:
        place = f"{job.output.directory}/rank.%r"
        words += ["-outfile-pattern", f"{place}.out", "-errfile-pattern", f"{place}.err"]
    return [*words, *(["-genvlist", ",".join(names)] if names else [])]


def _check(job: Job, family: Family) -> None:
    for host in job.hosts:
        _check_host(host)
    hydra = family in (Family.MPICH, Family.INTEL)
    if hydra and len(job.interfaces) > 1:
        raise JobError(f"--network-interfaces {','.join(job.interfaces)}: {family.value} takes one only")
    network = next((name for name in job.interfaces if "/" in name), None)
    if hydra and network is not None:
        raise JobError(f"--network-interfaces {network}: {family.value} takes the name of an interface, and no network")
    if job.mpi.tcp and family is not Family.SPECTRUM:
        raise JobError(f"--tcp: only Spectrum MPI knows it, and this is {family.value}: see --mpi-args")
    for word in _ssh_words(job):
        if re.search(r"\s", word) or not word:
            raise JobError(
                f"mpirun cuts arguments for ssh at spaces, and {word!r} has one: write it into ~/.ssh/config"
            )


def _check_host(host: HostSpec) -> None:
    if host.user is not None or host.port is not None:
        raise JobError(
            f"--launcher mpi: mpirun takes no user and no port of a single host, as {host.name} has: write them into "
            "~/.ssh/config, or give all hosts the same port with -p"
        )
    if not is_host_name(host.name):
        raise JobError(f"--launcher mpi: mpirun takes names and IPv4 addresses, and {host.name} is neither")


def _ssh_words(job: Job) -> list[str]:
    words = [] if job.ssh.port is None else ["-p", str(job.ssh.port)]
    words += [] if job.ssh.identity_file is None else ["-i", job.ssh.identity_file]
    return [*words, *job.ssh.arguments]


def _with_counts(counts: Mapping[str, int]) -> str:
    return ",".join(f"{name}:{count}" for name, count in counts.items())
