"""One rank of one contestant: opens its library, then does what the driver says, turn by turn.

Started by contest.py, never by hand: python contestant.py SOCKET CONTESTANT LIBRARY RANKS. Between its turns it sleeps
in a read, so it costs the others nothing. A process whose library has no torch imports none.
"""

from __future__ import annotations

import importlib
import itertools
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # workloads need known answers of horo, which peers lack

from channel import Channel, ChannelClosed, Message
from libraries import Library, open_library

# Where launchers write a rank's number: hororun and contest.py, Open MPI, MPICH.
RANK_VARIABLES = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")

LEAVE_LIMIT_S = 3


class Unsupported(Exception):
    """Raised by a workload's ``prepare``: this library cannot do that. The text says what is missing."""


def nothing() -> dict[str, float]:
    return {}


def always_right() -> str:
    return ""


@dataclass(frozen=True)
class Work:
    """What ``prepare(library, parameters)`` of a module in workloads/ returns.

    Attributes:
        call: the measured call. All ranks make the same number of them.
        check: compares a result with a known answer; returns "" or what is wrong. Runs before and after all turns.
        figures: further figures of the turn that has just ended, by name.
        before_turn: runs at the start of each turn, outside the measured time.
        finish: waits for what calls have only begun, as those of a GPU: behind the calls that are not counted, and as
            part of the measured time behind the last one.
    """

    call: Callable[[], object]
    check: Callable[[], str] = field(default=always_right)
    figures: Callable[[], dict[str, float]] = field(default=nothing)
    before_turn: Callable[[], object] = field(default=nothing)
    finish: Callable[[], object] = field(default=nothing)


def rank_here() -> int:
    for name in RANK_VARIABLES:
        if name in os.environ:
            return int(os.environ[name])
    raise RuntimeError(f"none of {', '.join(RANK_VARIABLES)} is set, so this process does not know its rank")


def run_turn(work: Work, library: Library, count: int, *, warm: int, each: bool) -> Message:
    """Times ``count`` calls after ``warm`` uncounted ones; with ``each``, every call by itself."""
    work.before_turn()
    library.barrier()
    for _ in range(warm):  # all ranks are here now; the exit from a barrier is not part of the time
        work.call()
    work.finish()
    clock, call = time.perf_counter_ns, work.call
    before = resource.getrusage(resource.RUSAGE_SELF)
    stamps = [clock()]
    if each:
        for _ in range(count):
            call()
            work.finish()
            stamps.append(clock())
    else:
        for _ in range(count):
            call()
        work.finish()
        stamps.append(clock())
    after = resource.getrusage(resource.RUSAGE_SELF)
    spans = [(end - begin) / 1e3 for begin, end in itertools.pairwise(stamps)]
    return {
        "mean_us": sum(spans) / count,
        "calls_us": spans if each else [],
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "switches_voluntary": after.ru_nvcsw - before.ru_nvcsw,
        "switches_forced": after.ru_nivcsw - before.ru_nivcsw,
        "page_faults": after.ru_minflt - before.ru_minflt,
        "figures": work.figures(),
    }


class Rank:
    """Serves the driver's messages until it says ``end``."""

    def __init__(self, channel: Channel, library: Library) -> None:
        self._channel = channel
        self._library = library
        self._works: dict[str, Work] = {}
        self._idle_since = (time.monotonic(), time.process_time())

    def serve(self) -> None:
        while True:
            message = self._channel.receive()
            wall, cpu = time.monotonic() - self._idle_since[0], time.process_time() - self._idle_since[1]
            if message["do"] == "end":
                return
            answer = self._answer(message)
            self._channel.send({**answer, "idle_s": wall, "idle_cpu_s": cpu})
            self._idle_since = (time.monotonic(), time.process_time())

    def _answer(self, message: Message) -> Message:
        case = message["case"]
        if message["do"] == "prepare":
            module = importlib.import_module(f"workloads.{message['workload']}")
            try:
                self._works[case] = module.prepare(self._library, message["parameters"])
            except Unsupported as reason:
                return {"unsupported": str(reason)}
            return {"unsupported": ""}
        if message["do"] == "check":
            return {"wrong": self._works[case].check()}
        if message["do"] == "forget":
            del self._works[case]
            return {}
        work = self._works[case]
        return run_turn(work, self._library, message["count"], warm=message["warm"], each=message["each"])


def main(words: list[str]) -> int:
    socket_name, contestant, kind, size = words
    channel = Channel.dial(socket_name)
    rank = rank_here()
    channel.send({"contestant": contestant, "rank": rank})

    def exchange(value: Any) -> list[Any]:
        channel.send({"exchange": value})
        values: list[Any] = channel.receive()["exchange"]
        return values

    try:
        library = open_library(kind, rank, int(size), exchange)
        try:
            channel.send({"ready": library.versions()})
            Rank(channel, library).serve()
        except ChannelClosed:
            # The driver has given up, or is gone: leave in order, so that nothing stays behind, if all others can too.
            signal.alarm(LEAVE_LIMIT_S)
            library.close()
            return 1
        library.close()
    except ChannelClosed:
        os._exit(1)
    except BaseException as error:  # whatever it is, the driver has to hear of it
        traceback.print_exc()
        channel.send({"failed": f"{type(error).__name__}: {error}"})
        sys.stderr.flush()
        os._exit(1)
    channel.close()
    return 0


if __name__ == "__main__":
    # Workloads import from the module `contestant`; what runs here is another copy of it, named __main__.
    import contestant

    sys.exit(contestant.main(sys.argv[1:]))
