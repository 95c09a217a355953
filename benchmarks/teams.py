"""Two teams of the same ranks: do they hold one another up?

    python benchmarks/teams.py --layouts "2;1,1" --sizes 4K,256K,16M --rounds 9

Ranks are forked processes of numpy arrays without torch; hosts are joined by TCP over loopback. In each round, in turn:

- one after the other: an allreduce in the first team, then one in the second, both waited for;
- at once: both are submitted, then waited for; the ratio to the former says what running side by side costs;
- beside: a small allreduce in the second team while the first one is never without a large one; the share says which
  part of the large one's time it takes, which would be 1 or more if it waited for it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import forks
import numpy as np
import report

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from fabric import close_setup, make_setups, make_team_links  # noqa: E402

from horo.core.context import DTYPES, OPS, REDUCE_OPS, Context, RequestBuffer, Tensor  # noqa: E402

TITLES = "{:<8} {:>8} {:>14} {:>12} {:>7} {:>14} {:>10} {:>7}"
SMALL_COUNT = 1024


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Two teams of the same ranks, one after the other and at once.")
    parser.add_argument("--layouts", default="2;1,1", help="ranks of each host, layouts apart by ';'")
    parser.add_argument("--sizes", default="4K,256K,16M", help="bytes of the tensors (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="(default: %(default)s)")
    parser.add_argument("--turn-ms", type=float, default=100, help="about, per size and way (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the result here too")
    return parser.parse_args(words)


class Teams:
    """One rank with two teams that have all ranks."""

    def __init__(self, context: Context, links: list[dict[str, Any]]) -> None:
        self.context = context
        self.teams = [context.add_team(range(context.size), **links[i]) for i in range(2)]

    def request(self, name: str, array: np.ndarray, team: int, op: str = "sum", sync: bool = False) -> RequestBuffer:
        tensor = Tensor(array.ctypes.data, array.ctypes.data, array.shape, DTYPES[str(array.dtype)])
        return RequestBuffer.of(
            OPS["allreduce"], name, [tensor], reduce_op=REDUCE_OPS[op], team=self.teams[team], sync=sync
        )

    def agreed(self, seconds: float) -> float:
        """The longest of all ranks, so that all do the same."""
        clock = np.array([seconds])
        self.context.run(self.request("clock", clock, 0, "max", sync=True))
        return float(clock[0])

    def after(self, calls: list[RequestBuffer]) -> None:
        for call in calls:
            self.context.finish(self.context.submit(call))

    def at_once(self, calls: list[RequestBuffer]) -> None:
        for handle in [self.context.submit(call) for call in calls]:
            self.context.finish(handle)

    def time(self, way: Any, calls: list[RequestBuffer], times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            way(calls)
        return self.agreed((time.perf_counter() - begin) / times)

    def time_beside(self, large: RequestBuffer, small: RequestBuffer, times: int) -> float:
        """Seconds of a small one, of which several go by while one large one is under way."""
        spent = []
        for _ in range(times):
            handle = self.context.submit(large)
            for _ in range(4):
                begin = time.perf_counter()
                self.context.finish(self.context.submit(small))
                spent.append(time.perf_counter() - begin)
            self.context.finish(handle)
        return self.agreed(statistics.median(spent))


def measure(teams: Teams, size: int, rounds: int, turn_s: float) -> dict[str, list[float]]:
    arrays = [np.zeros(max(1, size // 4), np.float32) for _ in range(2)]
    small = np.zeros(SMALL_COUNT, np.float32)
    calls = [teams.request("data", array, team) for team, array in enumerate(arrays)]
    beside = teams.request("small", small, 1)
    teams.time(teams.after, calls, 3)
    times = max(2, round(turn_s / teams.time(teams.after, calls, 3)))
    found: dict[str, list[float]] = {"after_us": [], "at_once_us": [], "beside_us": []}
    for index in range(rounds):
        ways = [("after_us", teams.after), ("at_once_us", teams.at_once)]
        for key, way in ways if index % 2 == 0 else reversed(ways):
            found[key].append(teams.time(way, calls, times) * 1e6)
        found["beside_us"].append(teams.time_beside(calls[0], beside, max(2, times // 4)) * 1e6)
    return found


def run_layout(layout: str, sizes: list[int], rounds: int, turn_s: float) -> dict[int, dict[str, list[float]]]:
    """Forks the ranks; what rank 0 has measured."""
    hosts = [int(count) for count in layout.split(",")]
    setups = make_setups(hosts, tcp=True, segment_bytes=forks.segment_bytes(hosts), spin_us=1000)
    links = [make_team_links(setups[0].host_of_rank, range(len(setups)), tcp=True) for _ in range(2)]
    rank = forks.fork_ranks(setups, close_setup)
    for index in range(len(setups)):
        if index != rank:
            for made in links:
                for descriptors in made[index].values():
                    for descriptor in descriptors:
                        with contextlib.suppress(OSError):
                            os.close(descriptor)
    context = Context(setups[rank])
    teams = Teams(context, [made[rank] for made in links])
    found = {size: measure(teams, size, rounds, turn_s) for size in sizes}
    context.destroy()
    forks.end_ranks(rank, len(setups))
    return found


def main(words: list[str]) -> None:
    chosen = parse_arguments(words)
    sizes = [report.parse_size(word) for word in chosen.sizes.split(",")]
    rows = []
    print(
        TITLES.format("hosts", "size", "after other us", "at once us", "ratio", "(least, most)", "beside us", "share")
    )
    for layout in chosen.layouts.split(";"):
        for size, found in run_layout(layout, sizes, chosen.rounds, chosen.turn_ms / 1000).items():
            ratios = sorted(b / a for a, b in zip(found["after_us"], found["at_once_us"], strict=True))
            after, once, beside = (statistics.median(found[key]) for key in ("after_us", "at_once_us", "beside_us"))
            rows.append({"layout": layout, "bytes": size, **found, "ratio": statistics.median(ratios)})
            print(
                TITLES.format(
                    layout, report.size_text(size), f"{after:.1f}", f"{once:.1f}", f"{statistics.median(ratios):.3f}",
                    f"({ratios[0]:.2f}, {ratios[-1]:.2f})", f"{beside:.1f}", f"{beside / (after / 2):.2f}",
                ),
                flush=True,
            )  # fmt: skip
    report.save(chosen, "teams", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
