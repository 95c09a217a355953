"""How much of a link's rate a sum between hosts reaches.

    python benchmarks/two_hosts.py                          2 and 4 hosts, 1 and 2 ranks each, 1 and 10 Gbit/s
    python benchmarks/two_hosts.py --hosts 2 --rates 1gbit

The hosts are network namespaces of this machine, whose cables the kernel holds to a rate (tbf), so this needs root and
iproute2; without them it says so and ends with code 0. Contestants take turns in the processes of one job, which
hororun starts. What the columns mean stands in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

import report
import spaces
from contest import START_LIMIT_S, ContestError, start

RANK = Path(__file__).with_name("two_hosts_rank.py")
PLAIN = "tcp"
CONTESTANTS = (PLAIN, "gloo", "horo", "horo bf16", "horo fp16")
SLOWNESS_MAX = 20
OUTPUT_LINES = 15
# A full packet: 1448 bytes of data, 32 of TCP with timestamps, 20 of IP, 14 of Ethernet. The rate counts all of it.
FRAME_BYTES = spaces.MTU + 14
DATA_BYTES = spaces.MTU - 52


@dataclass(frozen=True)
class Layout:
    """Who sums over what."""

    hosts: int
    per_host: int
    rate: str
    size: int

    @property
    def bytes_to_send(self) -> float:
        """What each host must send, and receive, at least: 2 (h - 1) / h of the tensor."""
        return 2 * (self.hosts - 1) / self.hosts * self.size

    @property
    def name(self) -> str:
        ranks = f"{self.per_host} rank{'s' if self.per_host > 1 else ''}"
        return f"{report.size_text(self.size)}, {self.hosts} hosts of {ranks}, {self.rate}"


class Answer(TypedDict):
    """What rank 0 of a job says, by contestant: the time of each turn, and whether the sums were right."""

    seconds: dict[str, list[float]]
    right: dict[str, bool]


@dataclass(frozen=True)
class Result:
    """One contestant in one layout. Shares are of the link's rate, by the median."""

    hosts: int
    per_host: int
    rate: str
    bytes: int
    contestant: str
    seconds: list[float]
    median_s: float
    data_share: float
    frame_share: float
    right: bool

    @classmethod
    def of(cls, layout: Layout, contestant: str, seconds: Sequence[float], right: bool) -> Result:
        median = statistics.median(seconds)
        share = layout.bytes_to_send / median / spaces.rate_of(layout.rate)
        return cls(
            hosts=layout.hosts,
            per_host=layout.per_host,
            rate=layout.rate,
            bytes=layout.size,
            contestant=contestant,
            seconds=[round(value, 6) for value in seconds],
            median_s=median,
            data_share=share,
            frame_share=share * FRAME_BYTES / DATA_BYTES,
            right=right,
        )


def parse_rates(text: str) -> list[str]:
    for word in text.split(","):
        spaces.rate_of(word)
    return text.split(",")


def parse_counts(text: str) -> list[int]:
    """``1,2``."""
    words = text.split(",")
    if not all(word.isdigit() and 1 <= int(word) <= spaces.COUNT_MAX for word in words):
        raise argparse.ArgumentTypeError(f"'{text}' is no list of numbers from 1 to {spaces.COUNT_MAX}; write 2,4")
    return [int(word) for word in words]


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A sum between hosts, as a share of their links' rate.")
    parser.add_argument("--hosts", type=parse_counts, default="2,4", metavar="LIST", help="default: %(default)s")
    parser.add_argument(
        "--per-host", type=parse_counts, default="1,2", metavar="LIST", help="ranks on each (default: %(default)s)"
    )
    parser.add_argument(
        "--rates", type=parse_rates, default="1gbit,10gbit", metavar="LIST", help="default: %(default)s"
    )
    parser.add_argument(
        "--size", type=report.parse_size, default=64 << 20, help="of the tensor of float32 (default: 64M)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of every contestant (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all values there")
    arguments = parser.parse_args(words)
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: at least 1")
    if min(arguments.hosts) < 2:
        parser.error(f"--hosts {min(arguments.hosts)}: there is no link with less than 2")
    if arguments.size % 4:
        parser.error(f"--size {arguments.size}: float32 takes 4 bytes each")
    return arguments


def measure(layouts: Sequence[Layout], contestants: Sequence[str], rounds: int) -> list[Result]:
    """Runs a job for every layout; all of them have the same number of hosts.

    Raises:
        ContestError: a job failed.
    """
    results = []
    with spaces.Spaces(layouts[0].hosts) as made:
        for layout in layouts:
            made.limit(layout.rate)
            answer = run_job(made, layout, contestants, rounds)
            results += [Result.of(layout, name, answer["seconds"][name], answer["right"][name]) for name in contestants]
    return results


def run_job(made: spaces.Spaces, layout: Layout, contestants: Sequence[str], rounds: int) -> Answer:
    """Runs two_hosts_rank.py on every rank."""
    job = {"bytes": layout.size, "rounds": rounds, "contestants": list(contestants)}
    ranks = layout.hosts * layout.per_host
    launch = [sys.executable, "-m", "horo.runner", "-np", str(ranks), "-H", made.slots(ranks)]
    launch += [
        "--remote-shell",
        str(made.remote_shell),
        "--no-prefix",
        sys.executable,
        str(RANK),
        json.dumps(job),
    ]
    calls = (2 * rounds + 2) * len(contestants)
    limit_s = START_LIMIT_S + calls * SLOWNESS_MAX * layout.bytes_to_send / spaces.rate_of(layout.rate)
    try:
        done = subprocess.run([*made.enter(0), *launch], capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired as late:
        said = b"".join(filter(None, (late.stdout, late.stderr))).decode(errors="replace")
        raise ContestError(f"{layout.name}: the job has not ended within {limit_s:.0f} s{_last_lines(said)}") from None
    if done.returncode != 0:
        lines = _last_lines(done.stdout + done.stderr)
        raise ContestError(f"{layout.name}: the job ended with code {done.returncode}{lines}")
    answer: Answer = json.loads(done.stdout)
    return answer


def _last_lines(said: str) -> str:
    return "".join(f"\n    {line}" for line in said.splitlines()[-OUTPUT_LINES:])


def as_lines(results: Sequence[Result]) -> list[str]:
    """The table of one layout."""
    first = results[0]
    lines = [f"\n{Layout(first.hosts, first.per_host, first.rate, first.bytes).name}"]
    titles = "  {:<10} {:>28} {:>8} {:>8}  {}"
    lines.append(titles.format("", "min / median / max", "data", "frames", "sums"))
    for result in results:
        times = " / ".join(
            report.time_text(value * 1e6) for value in (min(result.seconds), result.median_s, max(result.seconds))
        )
        shares = (f"{result.data_share:.1%}", f"{result.frame_share:.1%}")
        sums = "-" if result.contestant == PLAIN else "ok" if result.right else "WRONG"
        lines.append(titles.format(result.contestant, times, *shares, sums))
    return lines


def run(arguments: argparse.Namespace) -> int:
    reason = spaces.why_not()
    if reason:
        print(f"two_hosts.py: skipped: {reason}")
        return 0
    print("A sum of float32 between hosts; shares of the link's rate: data alone, and frames, which the rate counts")
    results: list[Result] = []
    for hosts in arguments.hosts:
        for rate in arguments.rates:
            for per_host in arguments.per_host:
                found = measure([Layout(hosts, per_host, rate, arguments.size)], CONTESTANTS, arguments.rounds)
                print("\n".join(as_lines(found)), flush=True)
                results += found
    rows = [asdict(result) for result in results]
    report.save(arguments, "two_hosts", rows, tcp=spaces.congestion_control())
    return 0 if all(result.right for result in results) else 1


def check_rows(quick: bool = True) -> list[report.CheckRow]:
    """For check.py; none, with a sentence, where there can be no namespaces.

    Raises:
        ContestError: a job failed, or a sum was wrong.
    """
    reason = spaces.why_not()
    if reason:
        print(f"two_hosts.py: skipped: {reason}", file=sys.stderr)
        return []
    layouts = [Layout(2, per_host, "1gbit", 64 << 20) for per_host in (1, 2)]
    results = measure(layouts, (PLAIN, "gloo", "horo", "horo bf16"), 2 if quick else 11)
    wrong = [f"{result.contestant} on 2 hosts of {result.per_host}" for result in results if not result.right]
    if wrong:
        raise ContestError(f"wrong sums by {', '.join(wrong)}")
    return [
        row
        for layout in layouts
        for row in rows_for(layout, {found.contestant: found for found in results if found.per_host == layout.per_host})
    ]


def rows_for(layout: Layout, by_name: dict[str, Result]) -> list[report.CheckRow]:
    """The share of the rate, and what half the bytes give."""
    horo, gloo, plain, narrow = (by_name[name] for name in ("horo", "gloo", PLAIN, "horo bf16"))
    faster = horo.median_s / narrow.median_s
    return [
        report.CheckRow(
            what=layout.name,
            figure=100 * horo.frame_share,
            unit="%",
            peer="gloo",
            peer_figure=100 * gloo.frame_share,
            ratio=gloo.median_s / horo.median_s,
            target=">= 95 %",
            ok=horo.frame_share >= 0.95,
            note=f"with headers; data alone {horo.data_share:.1%}; plain TCP {plain.frame_share:.1%}",
        ),
        report.CheckRow(
            what=f"{layout.name}, bf16",
            figure=faster,
            unit="x",
            peer="",
            peer_figure=None,
            ratio=None,
            target=">= 1.9x",
            ok=faster >= 1.9,
            note="beside float32 of the same run",
        ),
    ]


if __name__ == "__main__":
    start(parse_arguments, run)
