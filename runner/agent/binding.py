"""The CPUs that each rank of a host is bound to (``--bind-to``). Pure, but for ``read_topology``."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BindingError", "Topology", "bind", "ranges", "read_topology", "spelled", "threads"]

Cpus = frozenset[int]


class BindingError(ValueError):
    """Ranks cannot be bound as asked for on this host."""


@dataclass(frozen=True)
class Topology:
    """What a machine says of itself; empty where it does not.

    Attributes:
        nodes: the CPUs of each NUMA node that has some.
        cores: the CPUs (hardware threads) of each core.
    """

    nodes: tuple[Cpus, ...]
    cores: tuple[Cpus, ...]


def read_topology(root: str | Path = "/sys/devices/system") -> Topology:
    """This machine's, as Linux tells it."""
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
        BindingError: the machine does not tell its NUMA nodes.
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
