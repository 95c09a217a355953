"""The hosts and slots that a batch system has given to the job of this process. Pure: reads its arguments.

The formats are those that the vendors document. A slot is a task, a process or a slot of the system.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from horo.config.hosts import SPECIAL_STEPS, parse_counts, parse_host_list
from horo.runner.hosts import HostSpec, is_host_name

__all__ = ["Allocation", "AllocationError", "find_allocation"]

_WAY_OUT = "name the hosts yourself with -H, or start the job anew"

Read = Callable[[str], str]
"""A function from a path to its text; raises OSError or UnicodeDecodeError."""


class AllocationError(ValueError):
    """A variable of the batch system cannot be understood; the message names it and its value."""


@dataclass(frozen=True)
class Allocation:
    """Hosts and slots that a batch system has given.

    Attributes:
        system: ``"Slurm"``, ``"LSF"``, ``"PBS"`` or ``"SGE"``.
        hosts: in the system's order; each has its slots.
        source: the job and the variables that said so, for messages.
        tasks: ranks that the job asked for, where that can be less than all slots; None: all slots.
    """

    system: str
    hosts: tuple[HostSpec, ...]
    source: str
    tasks: int | None = None


def find_allocation(environ: Mapping[str, str], read: Read) -> Allocation | None:
    """The allocation that ``environ`` describes; None: there is none.

    Raises:
        AllocationError: there is one, and it cannot be understood.
    """
    for parse in (_slurm, _lsf, _pbs, _sge):
        found = parse(environ, read)
        if found is not None:
            return found
    return None


# Slurm: SLURM_JOB_NODELIST and, per host, tasks, GPUs or CPUs


def _slurm(environ: Mapping[str, str], _read: Read) -> Allocation | None:
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    variable = "SLURM_JOB_NODELIST" if environ.get("SLURM_JOB_NODELIST") else "SLURM_NODELIST"
    if not job or not environ.get(variable):
        return None
    _one_of_many_tasks(environ)
    try:
        names = parse_host_list(environ[variable])
    except ValueError as error:
        raise _wrong(environ, variable, str(error)) from None
    said_by, slots = _slurm_slots(environ, len(names))
    hosts = _hosts(zip(names, slots, strict=True), f"{variable}={environ[variable]!r}")
    source = f"Slurm job {job} ({variable}={environ[variable]}, {said_by}={environ[said_by]})"
    # --ntasks=3 --ntasks-per-node=2 leaves a slot free on the second of two hosts.
    asked = _number(environ, "SLURM_NTASKS") if said_by == "SLURM_TASKS_PER_NODE" else None
    return Allocation("Slurm", hosts, source, asked if asked and asked < sum(slots) else None)


def _slurm_slots(environ: Mapping[str, str], count: int) -> tuple[str, list[int]]:
    """The variable with the number of ranks for each of ``count`` hosts, and the numbers."""
    asked = any(environ.get(name) for name in ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE"))
    step = _number(environ, "SLURM_STEP_ID")
    gpus = _gpu_variable(environ, count)
    if gpus is not None and (step is not None or not asked):
        return gpus, [_gpus(environ, gpus)] * count
    if environ.get("SLURM_TASKS_PER_NODE"):
        tasks = _counts(environ, "SLURM_TASKS_PER_NODE")
        # srun --pty and salloc's shell are steps of one task, which says nothing about how many ranks are wanted.
        if step is None or (step >= SPECIAL_STEPS and sum(tasks) == (_number(environ, "SLURM_NTASKS") or sum(tasks))):
            if len(tasks) != count:
                raise _wrong(environ, "SLURM_TASKS_PER_NODE", f"speaks of {len(tasks)} hosts, and the job has {count}")
            return "SLURM_TASKS_PER_NODE", tasks
    per_task = _number(environ, "SLURM_CPUS_PER_TASK") or 1
    for name in ("SLURM_JOB_CPUS_PER_NODE", "SLURM_CPUS_ON_NODE"):
        if environ.get(name):
            cpus = _counts(environ, name)
            if len(cpus) != count:
                raise _wrong(environ, name, f"speaks of {len(cpus)} hosts, and the job has {count}")
            return name, [max(1, each // per_task) for each in cpus]
    raise AllocationError(
        "Slurm names the hosts of the job but neither SLURM_TASKS_PER_NODE nor SLURM_JOB_CPUS_PER_NODE is set: "
        f"{_WAY_OUT}"
    )


def _one_of_many_tasks(environ: Mapping[str, str]) -> None:
    step, tasks = _number(environ, "SLURM_STEP_ID"), _number(environ, "SLURM_STEP_NUM_TASKS")
    if step is not None and step < SPECIAL_STEPS and tasks is not None and tasks > 1:
        raise AllocationError(
            f"SLURM_STEP_NUM_TASKS={tasks}: srun has started {tasks} copies of hororun, and each would run the whole "
            "job: start hororun once, without srun, or the training script itself with srun"
        )


def _gpu_variable(environ: Mapping[str, str], count: int) -> str | None:
    """The variable with the number of GPUs of each of ``count`` hosts; None: no such variable is set."""
    if environ.get("SLURM_GPUS_PER_NODE"):
        return "SLURM_GPUS_PER_NODE"
    # --gres gives every host the same; --gpus, a number for the whole job, may not.
    equal = count == 1 or not environ.get("SLURM_GPUS")
    return "SLURM_GPUS_ON_NODE" if equal and environ.get("SLURM_GPUS_ON_NODE", "0") not in ("", "0") else None


def _gpus(environ: Mapping[str, str], name: str) -> int:
    """``4``, ``a100:4``, or several types: ``a100:2,v100:1``."""
    numbers = [item.rpartition(":")[2] for item in environ[name].split(",")]
    if not all(re.fullmatch(r"[0-9]{1,6}", number) for number in numbers) or not sum(map(int, numbers)):
        raise _wrong(environ, name, "is no number of GPUs such as 4 or a100:4")
    return sum(map(int, numbers))


def _counts(environ: Mapping[str, str], name: str) -> list[int]:
    try:
        counts = parse_counts(environ[name])
    except ValueError as error:
        raise _wrong(environ, name, str(error)) from None
    if not all(counts):
        raise _wrong(environ, name, "a host with 0 takes no rank")
    return counts


# LSF: LSB_MCPU_HOSTS, or LSB_DJOB_HOSTFILE, or LSB_HOSTS


def _lsf(environ: Mapping[str, str], read: Read) -> Allocation | None:
    job = environ.get("LSB_JOBID")
    if not job:
        return None
    if environ.get("LSB_MCPU_HOSTS"):
        name = "LSB_MCPU_HOSTS"
        pairs = _mcpu_hosts(environ)
    elif environ.get("LSB_DJOB_HOSTFILE"):
        name = "LSB_DJOB_HOSTFILE"
        pairs = [(line.strip(), 1) for line in _text(environ, name, read).splitlines() if line.strip()]
    elif environ.get("LSB_HOSTS"):
        name = "LSB_HOSTS"
        pairs = [(word, 1) for word in environ[name].split()]
    else:
        return None
    hosts = _without_launch_node(environ, _hosts(pairs, f"{name}={environ[name]!r}"))
    return Allocation("LSF", hosts, f"LSF job {job} ({name}={environ[name]})")


def _mcpu_hosts(environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """``h1 4 h2 2``."""
    words = environ["LSB_MCPU_HOSTS"].split()
    if len(words) % 2 or not all(re.fullmatch(r"[1-9][0-9]{0,6}", word) for word in words[1::2]):
        raise _wrong(environ, "LSB_MCPU_HOSTS", "is no list of hosts and their slots such as 'h1 4 h2 4'")
    return list(zip(words[::2], map(int, words[1::2]), strict=True))


def _without_launch_node(environ: Mapping[str, str], hosts: tuple[HostSpec, ...]) -> tuple[HostSpec, ...]:
    """The hosts of an allocation by CSM (machines with jsrun), without the first, which only runs the job's script."""
    others = hosts[1:]
    if environ.get("CSM_ALLOCATION_ID") and hosts[0].slots == 1 and others:
        return others
    return hosts


# PBS Pro, OpenPBS, Torque: PBS_NODEFILE, one line per rank


def _pbs(environ: Mapping[str, str], read: Read) -> Allocation | None:
    if not environ.get("PBS_NODEFILE"):
        return None
    lines = [line.strip() for line in _text(environ, "PBS_NODEFILE", read).splitlines()]
    hosts = _hosts(((line, 1) for line in lines if line), f"PBS_NODEFILE={environ['PBS_NODEFILE']!r}")
    job = environ.get("PBS_JOBID", "without a number")
    return Allocation("PBS", hosts, f"PBS job {job} (PBS_NODEFILE={environ['PBS_NODEFILE']})")


# Grid Engine: PE_HOSTFILE, lines of host, slots, queue, processors


def _sge(environ: Mapping[str, str], read: Read) -> Allocation | None:
    if not environ.get("PE_HOSTFILE"):
        return None
    pairs = []
    for line in _text(environ, "PE_HOSTFILE", read).splitlines():
        words = line.split()
        if not words:
            continue
        if len(words) < 2 or not re.fullmatch(r"[1-9][0-9]{0,6}", words[1]):
            raise _wrong(environ, "PE_HOSTFILE", f"its line {line!r} is no host with its slots such as 'h1 4 all.q'")
        pairs.append((words[0], int(words[1])))
    hosts = _hosts(pairs, f"PE_HOSTFILE={environ['PE_HOSTFILE']!r}")
    job = environ.get("JOB_ID", "without a number")
    return Allocation("SGE", hosts, f"SGE job {job} (PE_HOSTFILE={environ['PE_HOSTFILE']})")


# Common to all


def _hosts(pairs: Iterable[tuple[str, int]], said: str) -> tuple[HostSpec, ...]:
    """Adds up the slots of hosts that come more than once; keeps their order."""
    slots: dict[str, int] = {}
    for name, count in pairs:
        if not is_host_name(name):
            raise AllocationError(f"{said}: {name!r} is no name of a host: {_WAY_OUT}")
        slots[name] = slots.get(name, 0) + count
    if not slots:
        raise AllocationError(f"{said} names no host: {_WAY_OUT}")
    return tuple(HostSpec(name, slots=count) for name, count in slots.items())


def _text(environ: Mapping[str, str], name: str, read: Read) -> str:
    try:
        return read(environ[name])
    except OSError as error:
        raise _wrong(environ, name, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _wrong(environ, name, f"{PurePath(environ[name]).name} is not text") from None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name)
    if not value:
        return None
    if not re.fullmatch(r"[0-9]{1,10}", value):
        raise _wrong(environ, name, "is no number")
    return int(value)


def _wrong(environ: Mapping[str, str], name: str, fault: str) -> AllocationError:
    return AllocationError(f"{name}={environ[name]!r}: {fault}: {_WAY_OUT}")
