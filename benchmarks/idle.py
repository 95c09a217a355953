"""What a job does while nothing is asked of it: wake-ups, time on a core, packets.

    python benchmarks/idle.py
    python benchmarks/idle.py --np 4 --seconds 30 --json out.json

The ranks start, reduce 1 MiB once, and then wait for a message that does not come. Counted are all threads of all
processes of the job, the launcher's too. The terms are defined in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import launching
import psutil
import report
from channel import Channel, ChannelClosed
from contest import start
from resting import activity_of

RANK = str(Path(__file__).resolve().parent / "idle_rank.py")
LIMIT_S = 60.0
SETTLE_S = 1.0
ANSWER_S = 0.2
JOBS = {"horo, one host": "horo", "horo, a host per rank": "horo-apart", "gloo under torchrun": "gloo"}
OURS = ("horo, one host", "horo, a host per rank")


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a job does while nothing is asked of it.")
    parser.add_argument("--np", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to look (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all values there")
    arguments = parser.parse_args(words)
    if arguments.np < 1:
        parser.error(f"--np {arguments.np}: at least 1")
    if not arguments.seconds > 0:
        parser.error(f"--seconds {arguments.seconds:g}: must be more than 0")
    return arguments


@contextlib.contextmanager
def resting_job(library: str, ranks: int) -> Iterator[tuple[launching.Job, list[Channel]]]:
    """A job whose ranks have used their library once and wait now; at the end they are sent home.

    Raises:
        ContestError: it failed, or took too long.
    """
    launch = launching.torchrun if library == "gloo" else launching.hororun
    with contextlib.ExitStack() as stack:
        path = f"{stack.enter_context(tempfile.TemporaryDirectory(prefix='idle-'))}/socket"
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(path)
        listener.listen(ranks)
        listener.settimeout(LIMIT_S)
        job = stack.enter_context(launching.Job(launch(ranks, [RANK, path, library])))
        channels = []
        try:
            for _ in range(ranks):
                connection, _ = listener.accept()
                connection.settimeout(LIMIT_S)
                channels.append(Channel(connection))
                stack.callback(connection.close)
            for channel in channels:
                channel.receive()
            yield job, channels
            for channel in channels:
                channel.send({"do": "end"})
        except (ChannelClosed, TimeoutError) as error:
            raise job.error(f"a rank does not answer ({error})") from None
        job.finish(LIMIT_S)


def count(channels: Sequence[Channel]) -> dict[str, int]:
    """Packets and connections of all ranks."""
    total = {"packets": 0, "connections": 0}
    for channel in channels:
        channel.send({"do": "count"})
        answer = channel.receive()
        total = {name: value + answer[name] for name, value in total.items()}
    return total


def measure(name: str, ranks: int, seconds: float) -> dict[str, Any]:
    """The row of one job."""
    with resting_job(JOBS[name], ranks) as (job, channels):
        members = [channel.peer()[0] for channel in channels]
        whole = psutil.Process(job.process.pid)
        others = [process.pid for process in (whole, *whole.children(recursive=True)) if process.pid not in members]
        time.sleep(SETTLE_S)  # for what a start leaves behind: acknowledgements, threads of torch that fall asleep
        before = count(channels)
        time.sleep(ANSWER_S)  # the ranks are back in their reads
        begin = activity_of(members), activity_of(others)
        time.sleep(seconds)
        ranks_did, others_did = activity_of(members).since(begin[0]), activity_of(others).since(begin[1])
        after = count(channels)
    return {
        "job": name,
        "ranks": ranks,
        "seconds": seconds,
        "wake_ups_ranks": ranks_did.wake_ups,
        "wake_ups_launcher": others_did.wake_ups,
        "cpu_ms_ranks": ranks_did.cpu_ns / 1e6,
        "cpu_ms_launcher": others_did.cpu_ns / 1e6,
        "packets": after["packets"] - before["packets"],
        "connections": after["connections"],
    }


def as_table(rows: Sequence[dict[str, Any]], seconds: float) -> str:
    """The table that people read."""
    form = "{:22} | {:>8} {:>8} | {:>10} {:>10} | {:>8} {:>11}"
    lines = [
        f"{rows[0]['ranks']} rank(s) idle for {seconds:g} s",
        form.format("", "wake-ups", "launcher", "CPU in ms", "launcher", "packets", "connections"),
    ]
    for row in rows:
        cpu = [f"{row[name]:.3f}" for name in ("cpu_ms_ranks", "cpu_ms_launcher")]
        wakes = [row["wake_ups_ranks"], row["wake_ups_launcher"]]
        lines.append(form.format(row["job"], *wakes, *cpu, row["packets"], row["connections"]))
    return "\n".join(lines)


def check_rows(quick: bool = True) -> list[report.CheckRow]:
    """The lines of `make bench-check`."""
    seconds = 10.0
    names = OURS if quick else tuple(JOBS)
    with ThreadPoolExecutor(len(names)) as at_once:  # what one job does is not counted with another
        rows = list(at_once.map(lambda name: measure(name, 2, seconds), names))
    return [row for measured in rows if measured["job"] in OURS for row in _check_rows_of(measured)]


def _check_rows_of(row: dict[str, Any]) -> list[report.CheckRow]:
    figures = [
        ("wake-ups", row["wake_ups_ranks"] + row["wake_ups_launcher"], ""),
        ("CPU", (row["cpu_ms_ranks"] + row["cpu_ms_launcher"]) / row["seconds"] / 10, "%"),
        ("packets", row["packets"], ""),
    ]
    return [
        report.CheckRow(
            f"idle {row['seconds']:g} s, {row['job']}: {what}", figure, unit, "", None, None, "= 0", figure == 0
        )
        for what, figure, unit in figures
    ]


def run(arguments: argparse.Namespace) -> int:
    rows = [measure(name, arguments.np, arguments.seconds) for name in JOBS]
    print(as_table(rows, arguments.seconds))
    report.save(arguments, "idle", rows)
    return 0


if __name__ == "__main__":
    start(parse_arguments, run)
