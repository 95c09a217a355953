"""This machine: its cores, NUMA nodes and GPUs, how many ranks it takes by itself, and their CPUs (``--bind-to``)."""

from __future__ import annotations

import contextlib
import os
import platform
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horo import __version__

__all__ = [
    "BindingError",
    "Topology",
    "bind",
    "core_count",
    "default_slots",
    "gpu_count",
    "host_facts",
    "ranges",
    "read_topology",
    "spelled",
    "threads",
]

Cpus = frozenset[int]


class BindingError(ValueError):
    """Ranks cannot be bound as asked for on this host."""


def host_facts() -> dict[str, Any]:
    """Facts about this host for hororun: versions, cores, GPUs."""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "cores": core_count(),
        "gpus": gpu_count(os.environ),
    }


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gpu_count(environment: Mapping[str, str]) -> int:
    """NVIDIA GPUs, by ``CUDA_VISIBLE_DEVICES`` where it is set; as there, nothing after a negative number counts."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        folder = Path("/proc/driver/nvidia/gpus")
        return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
    count = 0
    for item in filter(None, (word.strip() for word in visible.split(","))):
        if item.startswith("-"):
            break
        count += 1
    return count


def default_slots(cores: int, gpus: int) -> int:
    """Slots of a host for which none were named: its GPUs, or its cores where it has none."""
    return gpus or max(1, cores)


@dataclass(frozen=True)
class Topology:
    """Cores and NUMA nodes of a machine; empty where it does not tell them.

    Attributes:
        nodes: the CPUs of each NUMA node that has some.
        cores: the CPUs (hardware threads) of each core.
    """

    nodes: tuple[Cpus, ...]
    cores: tuple[Cpus, ...]


def read_topology(root: str | Path = "/sys/devices/system") -> Topology:
    """That of this machine, from Linux."""
    nodes = sorted(Path(root).glob("node/node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    cores = {_read_cpus(path) for path in Path(root).glob("cpu/cpu[0-9]*/topology/thread_siblings_list")}
    return Topology(tuple(filter(None, map(_read_cpus, nodes))), tuple(sorted(filter(None, cores), key=min)))


def bind(how: str, ranks: Sequence[int], allowed: Collection[int], topology: Topology) -> dict[int, Cpus]:
    """The CPUs of each rank.

    Args:
        how: ``"core"``: the cores are shared out evenly, whole, neighbours to one rank; ``"numa"``: so are the NUMA
            nodes; ``"none"``: nobody is bound. Ranks share a core, or a node, where there are more ranks.
        ranks: those of this host, in order.
        allowed: the CPUs that this process may use.
        topology: of this machine.

    Raises:
        BindingError: Linux names no NUMA node of this machine.
    """
    if how == "none":
        return {}
    units = _nodes(allowed, topology) if how == "numa" else _cores(allowed, topology)
    here, count = len(units), len(ranks)
    bound = {}
    for index, rank in enumerate(ranks):
        first = index * here // count
        bound[rank] = Cpus().union(*units[first : max(first + 1, (index + 1) * here // count)])
    return bound


def threads(bound: Mapping[int, Cpus]) -> dict[int, int]:
    """How many threads each rank may have: its CPUs, shared with the ranks that are bound to the same ones."""
    sharing = Counter(bound.values())
    return {rank: max(1, len(cpus) // sharing[cpus]) for rank, cpus in bound.items()}


def spelled(cpus: Collection[int]) -> str:
    """``CPU 3``, ``CPUs 0-3,8``."""
    return f"CPU{'s' if len(cpus) > 1 else ''} {ranges(sorted(cpus))}"


def _nodes(allowed: Collection[int], topology: Topology) -> list[Cpus]:
    nodes = [node & frozenset(allowed) for node in topology.nodes]
    if not any(nodes):
        raise BindingError("--bind-to numa: /sys/devices/system/node names no NUMA node here; try --bind-to core")
    return [node for node in nodes if node]


def _cores(allowed: Collection[int], topology: Topology) -> list[Cpus]:
    """Cores of one NUMA node stand side by side."""
    cores = [core & frozenset(allowed) for core in topology.cores]
    known = Cpus().union(*cores)
    cores += [Cpus({cpu}) for cpu in allowed if cpu not in known]
    node_of = {cpu: index for index, node in enumerate(topology.nodes) for cpu in node}
    return sorted(filter(None, cores), key=lambda core: (node_of.get(min(core), len(topology.nodes)), min(core)))


def _read_cpus(path: Path) -> Cpus:
    """From a list like ``0-3,8-11``; nothing where there is none."""
    found: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for item in filter(None, path.read_text(encoding="ascii").strip().split(",")):
            first, _, last = item.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2,5"``; the numbers ascend."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
