"""How agreeing on a tensor grows with ranks and hosts: messages, hops, time, memory.

    python benchmarks/negotiation.py                               up to 1024 ranks on 128 hosts
    python benchmarks/negotiation.py --layouts 1x4,16x4 --rounds 5 --json out.json

Every rank is a whole engine with its background thread; all of them live in one process, and hosts are joined by
socket pairs. They agree on barriers, so what is measured is the agreement alone. The terms are defined in
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import report
from contest import ContestError, start
from relay import Relay, cut_in

from horo.core.context import OPS, Context, RequestBuffer
from horo.core.setup import Setup

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from fabric import make_setups  # tests/fabric.py: groups of ranks without a bootstrap

LAYOUTS = "1x2,2x1,1x8,2x4,8x1,1x64,8x8,64x1,32x8,128x2,128x8"
QUICK_LAYOUTS = "1x2,1x64,8x8,128x8"
DEADLINE_S = 120.0
QUIET_S = 0.002
QUIET_SHARE = 0.1
DESCRIPTORS_ASIDE = 200
STALL_WARNING_MS = 60_000


class Layout(NamedTuple):
    """So many hosts with so many ranks each."""

    hosts: int
    per_host: int

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    @property
    def hops_bound(self) -> int:
        """Up a tree of hosts and down again: 2 ceil(log2 hosts)."""
        return 2 * (self.hosts - 1).bit_length()

    @property
    def descriptors(self) -> int:
        """What all ranks together hold open: wake-ups and life lines by host, the arena, links along the tree."""
        local = self.per_host * self.per_host + 2 * (self.per_host - 1)
        return self.hosts * local + 2 * self.ranks + 6 * (self.hosts - 1) + DESCRIPTORS_ASIDE

    def __str__(self) -> str:
        return f"{self.hosts}x{self.per_host}"


@dataclass(frozen=True)
class Cost:
    """What one step, the agreement on a few names at once, has cost."""

    messages: int
    messages_most: int
    """By the rank that sent most."""
    latency_us: float
    cpu_us_per_rank: float


def parse_layouts(text: str) -> list[Layout]:
    """``1x8,16x4``: for argparse."""
    layouts = []
    for word in text.split(","):
        hosts, cross, per_host = word.strip().partition("x")
        if not cross or not hosts.isdigit() or not per_host.isdigit() or int(hosts) * int(per_host) == 0:
            raise argparse.ArgumentTypeError(f"'{word}' is not a layout; write hosts x ranks per host, as 16x4")
        layouts.append(Layout(int(hosts), int(per_host)))
    return layouts


def parse_counts(text: str) -> list[int]:
    """``1,100``: for argparse."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of counts; write them as 1,100")
    return [int(word) for word in words]


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Messages, hops, time and memory of the agreement, by ranks and hosts."
    )
    parser.add_argument(
        "--layouts",
        type=parse_layouts,
        default=LAYOUTS,
        metavar="LIST",
        help="hosts x ranks per host (default: %(default)s)",
    )
    parser.add_argument(
        "--tensors",
        type=parse_counts,
        default="1,100",
        metavar="LIST",
        help="names submitted at once (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=7, help="cached steps that are measured (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all values there")
    arguments = parser.parse_args(words)
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: at least 1")
    allowed = allow_descriptors()
    for layout in arguments.layouts:
        if layout.descriptors > allowed:
            parser.error(
                f"--layouts {layout}: about {layout.descriptors} open files in one process, {allowed} are allowed; "
                "raise the limit with ulimit -Hn, or put fewer ranks on a host"
            )
    return arguments


def allow_descriptors() -> int:
    """Raises the soft limit of open files to the hard one; returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize


def own_memory_bytes() -> int:
    """Memory of this process that nobody else would need without it: the proportional set size."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/smaps_rollup has no line 'Pss:'; this needs Linux 4.14 or newer")


class World:
    """All ranks of a layout. ``relayed``: with a relay in every link between hosts, which counts hops and bytes."""

    def __init__(self, layout: Layout, *, relayed: bool = False) -> None:
        self.layout = layout
        setups = make_setups(
            [layout.per_host] * layout.hosts,
            data_links=False,
            spin_us=0,  # as everywhere where ranks outnumber cores
            stall_warning_ms=STALL_WARNING_MS,
        )
        self.relay: Relay | None = None
        if relayed:
            setups, self.relay = _with_relay(setups, layout)
        self._before = own_memory_bytes()
        self.contexts = [Context(setup) for setup in setups]

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        threads = [threading.Thread(target=context.destroy) for context in self.contexts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.relay is not None:
            self.relay.join(DEADLINE_S)

    def memory_bytes_per_rank(self) -> float:
        """What the ranks have added to this process so far."""
        return (own_memory_bytes() - self._before) / self.layout.ranks

    def sent(self) -> list[int]:
        """Messages to other hosts by rank, since the start."""
        return [context.counters()["messages_sent"] for context in self.contexts]

    def step(self, names: Sequence[str]) -> Cost:
        """All ranks agree on ``names``. The farthest from the root comes last, when nothing else is left to do."""
        last = self.layout.ranks - 1
        self._settle()
        before, begin_cpu, begin_own = self.sent(), time.process_time(), time.thread_time()
        handles = {rank: self._submit(rank, names) for rank in range(self.layout.ranks) if rank != last}
        self._settle()
        begin = time.perf_counter()
        handles[last] = self._submit(last, names)
        for rank in sorted(handles, reverse=True):
            for handle in handles[rank]:
                self.contexts[rank].wait(handle)
        latency_s = time.perf_counter() - begin
        cpu_s = (time.process_time() - begin_cpu) - (time.thread_time() - begin_own)
        for rank, mine in handles.items():
            for handle in mine:
                self.contexts[rank].release(handle)
        by_rank = [after - earlier for after, earlier in zip(self.sent(), before, strict=True)]
        return Cost(sum(by_rank), max(by_rank), latency_s * 1e6, cpu_s * 1e6 / self.layout.ranks)

    def _submit(self, rank: int, names: Sequence[str]) -> list[int]:
        return [self.contexts[rank].submit(RequestBuffer.of(OPS["barrier"], name)) for name in names]

    def _settle(self) -> None:
        """Returns when all other threads of this process have nothing to do any more: they use no time of a core."""
        deadline = time.monotonic() + DEADLINE_S
        quiet = 0
        while quiet < 3:
            begin, begin_own = time.process_time(), time.thread_time()
            time.sleep(QUIET_S)
            others = (time.process_time() - begin) - (time.thread_time() - begin_own)
            quiet = quiet + 1 if others < QUIET_S * QUIET_SHARE else 0
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {DEADLINE_S:g} s the ranks of layout {self.layout} still work")


def _with_relay(setups: Sequence[Setup], layout: Layout) -> tuple[list[Setup], Relay]:
    """The same setups with a relay in the middle of every control link."""
    leaders = [host * layout.per_host for host in range(layout.hosts)]
    links = {
        (host, other): setups[leaders[host]].control_fds[other] for host in range(layout.hosts) for other in range(host)
    }
    relay, replaced = cut_in({pair: fd for pair, fd in links.items() if fd >= 0})
    changed = list(setups)
    for (host, other), fd in replaced.items():
        old = changed[leaders[host]]
        fds = list(old.control_fds)
        fds[other] = fd
        changed[leaders[host]] = Setup(**{**vars(old), "control_fds": fds})
    relay.start()
    return changed, relay


def measure(layout: Layout, counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """The rows of one layout, in this process."""
    rows = []
    with World(layout) as world:
        memory_idle = world.memory_bytes_per_rank()
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        for count in counts:
            names = [f"layer{count}.{index}.weight" for index in range(count)]
            first = world.step(names)
            cached = [world.step(names) for _ in range(rounds)]
            for kind, costs in (("first", [first]), ("cached", cached)):
                rows.append(_row(layout, count, kind, costs))
        memory_used = world.memory_bytes_per_rank()
    for row in rows:
        row["memory_idle_bytes"] = round(memory_idle / 1024) * 1024
        row["memory_used_bytes"] = round(memory_used / 1024) * 1024
        row["descriptors"] = descriptors
    if layout.hosts > 1:
        _add_hops(layout, rows)
    return rows


def _row(layout: Layout, count: int, kind: str, costs: Sequence[Cost]) -> dict[str, Any]:
    latencies = [round(cost.latency_us, 1) for cost in costs]
    return {
        "hosts": layout.hosts,
        "ranks": layout.ranks,
        "tensors": count,
        "kind": kind,
        "messages": statistics.median(cost.messages for cost in costs),
        "messages_most": statistics.median(cost.messages_most for cost in costs),
        "hops": 0,
        "hops_bound": layout.hops_bound,
        "wire_bytes": 0,
        "latency_us": statistics.median(latencies),
        "latencies_us": latencies,
        "cpu_us_per_rank": round(statistics.median(cost.cpu_us_per_rank for cost in costs), 1),
    }


def _add_hops(layout: Layout, rows: Sequence[dict[str, Any]]) -> None:
    """The longest chain of messages and the bytes, from a second world whose links are watched."""
    with World(layout, relayed=True) as world:
        for row in rows:
            names = [f"layer{row['tensors']}.{index}.weight" for index in range(row["tensors"])]
            if world.relay is None:
                raise RuntimeError("a relayed world has a relay")
            world.relay.begin()
            world.step(names)
            seen = world.relay.seen()
            row["wire_bytes"] = seen.bytes
            row["hops"] = seen.hops if row["tensors"] == 1 else None


def measure_apart(layout: Layout, counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """The same in a process of its own, so that no layout finds memory that another has used.

    Raises:
        ContestError: it died.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, layout, counts, rounds))
    process.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        process.join()
        raise ContestError(f"the process with layout {layout} ended with {process.exitcode}") from None
    process.join()
    return list(answer)


def _serve(channel: Connection[Any, Any], layout: Layout, counts: Sequence[int], rounds: int) -> None:
    allow_descriptors()
    channel.send(measure(layout, counts, rounds))


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """The table that people read."""
    form = "{:>5} {:>5} {:>7} {:>6} | {:>8} {:>5} {:>9} {:>9} | {:>10} {:>9} | {:>9} {:>9}"
    titles = "hosts ranks tensors kind messages most bytes hops latency CPU/rank idle/rank used/rank"
    lines = [form.format(*titles.split())]
    for row in rows:
        hops = "" if row["hops"] is None else f"{row['hops']} of {row['hops_bound']}"
        lines.append(
            form.format(
                *(row[name] for name in ("hosts", "ranks", "tensors", "kind")),
                f"{row['messages']:g}",
                f"{row['messages_most']:g}",
                row["wire_bytes"],
                hops,
                report.time_text(row["latency_us"]),
                report.time_text(row["cpu_us_per_rank"]),
                f"{row['memory_idle_bytes'] >> 10} KiB",
                f"{row['memory_used_bytes'] >> 10} KiB",
            )
        )
    return "\n".join(lines)


def check_rows(quick: bool = True) -> list[report.CheckRow]:
    """The lines of `make bench-check`."""
    allow_descriptors()
    layouts = parse_layouts(QUICK_LAYOUTS if quick else LAYOUTS)
    rows = [row for layout in layouts for row in measure_apart(layout, [1], 3)]
    cached = [row for row in rows if row["kind"] == "cached"]
    one_host = max(row["messages"] for row in cached if row["hosts"] == 1)
    return [
        report.CheckRow("agreement, one host: messages", one_host, "", "", None, None, "= 0", one_host == 0),
        *[_check_hops(row) for row in cached if row["hosts"] > 1],
    ]


def _check_hops(row: dict[str, Any]) -> report.CheckRow:
    """One line per layout of several hosts."""
    memory_kib = row["memory_used_bytes"] >> 10
    note = f"{row['messages']:g} messages, {report.time_text(row['latency_us'])}, {memory_kib} KiB per rank"
    return report.CheckRow(
        f"agreement, {row['ranks']} ranks on {row['hosts']} hosts: hops",
        row["hops"],
        "",
        "",
        None,
        None,
        f"<= {row['hops_bound']}",
        row["hops"] <= row["hops_bound"],
        note,
    )


def run(arguments: argparse.Namespace) -> int:
    rows = []
    for layout in arguments.layouts:
        if sys.stderr.isatty():
            print(f"\r\033[K{layout}", end="", file=sys.stderr, flush=True)
        rows += measure_apart(layout, arguments.tensors, arguments.rounds)
    print(as_table(rows))
    report.save(arguments, "negotiation", rows)
    return 0


if __name__ == "__main__":
    start(parse_arguments, run)
