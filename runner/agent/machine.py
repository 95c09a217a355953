"""This machine: its cores, NUMA nodes and GPUs, and the shares that ranks are bound to (``--bind-to``)."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horo.config.hosts import ranges
from horo.version import __version__

__all__ = [
    "Binding",
    "BindingError",
    "Topology",
    "bind",
    "bind_gpus",
    "core_count",
    "host_facts",
    "read_topology",
    "spelled",
    "spelled_gpus",
    "threads",
    "visible_gpus",
]

Cpus = frozenset[int]


class BindingError(ValueError):
    """Ranks cannot be bound as asked for on this host."""


@dataclass(frozen=True)
class Binding:
    """The way the ranks of a host are bound.

    Attributes:
        cpus: to which CPUs, see ``bind``.
        gpus: whether each finds its share of the GPUs only, see ``bind_gpus``.
        threads_set: the user has set ``OMP_NUM_THREADS``; else that of a bound rank is the number of its CPUs.
    """

    cpus: str = "none"
    gpus: bool = False
    threads_set: bool = True


def host_facts() -> dict[str, Any]:
    """Facts about this host for hororun: versions, cores, GPUs."""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "cores": core_count(),
        "gpus": len(visible_gpus(os.environ)),
    }


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def visible_gpus(environment: Mapping[str, str], root: str | Path = "/") -> list[str]:
    """The NVIDIA GPUs that ranks find, each as ``CUDA_VISIBLE_DEVICES`` names it: a number or a UUID.

    If that variable is set, CUDA takes its words up to the first that names no GPU. Takes a moment: no library is
    loaded, no program is started, and no GPU wakes up.
    """
    here = _count_gpus(Path(root))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(here)]
    found: list[str] = []
    for word in map(str.strip, visible.split(",")):
        is_beyond = word.isdecimal() and 0 < here <= int(word)
        if is_beyond or not re.fullmatch(r"[0-9]+|(GPU|MIG)-\S+", word):
            break
        found.append(word)
    return found


def _count_gpus(root: Path) -> int:
    """Counted in the driver's folder; where a container hides that, by the devices that it lets through."""
    folder = root / "proc/driver/nvidia/gpus"
    if folder.is_dir():
        return sum(1 for _ in folder.iterdir())
    return sum(1 for _ in (root / "dev").glob("nvidia[0-9]*"))


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
    """The topology of this machine, from Linux."""
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
    return {rank: Cpus().union(*units[share]) for rank, share in _shares(ranks, len(units)).items()}


def bind_gpus(ranks: Sequence[int], gpus: Sequence[str]) -> dict[int, str]:
    """``CUDA_VISIBLE_DEVICES`` of each rank.

    Args:
        ranks: those of this host, in order.
        gpus: the GPUs that they share, from ``visible_gpus``: evenly, neighbours to one rank. Ranks share one where
            there are more ranks.

    Raises:
        BindingError: there is none.
    """
    if not gpus:
        raise BindingError(
            "--bind-gpus: there is no NVIDIA GPU here, by /proc/driver/nvidia, /dev/nvidia* and CUDA_VISIBLE_DEVICES"
        )
    return {rank: ",".join(gpus[share]) for rank, share in _shares(ranks, len(gpus)).items()}


def _shares(ranks: Sequence[int], here: int) -> dict[int, slice]:
    """The share of ``here`` things that each rank gets."""
    count = len(ranks)
    firsts = [index * here // count for index in range(count + 1)]
    return {rank: slice(firsts[index], max(firsts[index] + 1, firsts[index + 1])) for index, rank in enumerate(ranks)}


def threads(bound: Mapping[int, Cpus]) -> dict[int, int]:
    """The number of threads of each rank: its CPUs, shared with the ranks that are bound to the same ones."""
    sharing = Counter(bound.values())
    return {rank: max(1, len(cpus) // sharing[cpus]) for rank, cpus in bound.items()}


def spelled(cpus: Collection[int]) -> str:
    """``CPU 3``, ``CPUs 0-3,8``."""
    return f"CPU{'s' if len(cpus) > 1 else ''} {ranges(sorted(cpus))}"


def spelled_gpus(gpus: str) -> str:
    """``GPU 3``, ``GPUs 0,1``, ``GPU-1a2b``; ``gpus``: a value of ``CUDA_VISIBLE_DEVICES``."""
    return f"GPU{'s' if ',' in gpus else ''} {gpus}" if gpus[0].isdecimal() else gpus


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
