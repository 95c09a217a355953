"""Runs torch's own tests of torch.distributed, from the installed torch, over horo.

    python tests/torch_distributed/torch_suite.py [--ranks 2] [--as horo|gloo|mpi] [--over gloo] [-k PART] [--list FILE]

Each test runs in processes that are forked from this one, since torch takes seconds to import. ``--as gloo`` puts horo
in gloo's place, for the tests that ask which backend they run on; ``--as mpi`` runs those that torch has for mpi only.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["Outcome", "Suite"]

TEST_S = 60.0
_NEEDS_A_NAME = ("test_accumulate_gradients_no_sync", "test_grads_same_across_ranks_with_no_sync", "test_monitored_")
"""Beginnings of names of tests that know no backend but torch's own."""
_FOR_OTHERS = re.compile("(?i)gloo|mpi")
"""Reasons to leave out a test that names the backends of which torch knows that they can do it."""
_NEEDS_GLOO = ("test_ddp_logging_data_cpu", "test_monitored_barrier_gloo")
"""Beginnings of names of tests that ask C++ for the name of the backend, or for a method that gloo alone has."""
_SHOWN = 12_000
"""The last characters of what a failed test has written."""


@dataclass(frozen=True)
class Outcome:
    """What has become of a test."""

    name: str
    kind: str
    """``pass``, ``skip`` or ``fail``."""
    why: str
    seconds: float


class Suite:
    """The tests, with one backend."""

    def __init__(self, ranks: int, stands_for: str = "horo", over: str = "horo") -> None:
        """Loads the tests. ``over``: the backend that really works, ``gloo`` for comparison."""
        os.environ |= {"BACKEND": stands_for, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "HORO_RANK_PROCESS"):
            os.environ.pop(name, None)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"
        import torch  # noqa: PLC0415 - what it loads reads the environment

        torch.set_num_threads(1)
        if over == "horo":
            _put_in_place(stands_for)
        # torch's tests derive from its class, and those here use nothing of it.
        sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
        from torch.testing._internal.common_distributed import DistTestCases  # noqa: PLC0415

        for backends in DistTestCases.backend_feature.values():
            backends.add("horo")
        from torch.testing._internal.distributed import distributed_test as tests  # noqa: PLC0415

        self._tests: Any = tests
        self._stands_for = stands_for
        if stands_for != "gloo":  # tests with a group of ranks 1 and 2 ask for 8 ranks or mpi
            os.environ["BACKEND"] = "mpi" if ranks > 2 else "horo"
        self._is_by_name, self._is_over_horo = stands_for != "gloo", over == "horo"
        if self._is_over_horo:
            _expect_events(tests)
        self.ranks = ranks
        if over == "horo" and stands_for != "gloo":
            tests.BACKEND = "horo"
        self._class: Any = type(
            "TestHoro", (tests.TestDistBackend, tests.DistributedTest._DistTestBase), {"__module__": __name__}
        )
        skips = torch.testing._internal.common_distributed.TEST_SKIPS
        self._skips = {skip.exit_code: skip.message for skip in skips.values()}

    def names(self, part: str = "") -> list[str]:
        """The names of the tests that have ``part`` in them."""
        return [name for name in sorted(dir(self._class)) if name.startswith("test_") and part in name]

    def run(self, name: str) -> Outcome:
        """Runs a test on all ranks."""
        why = getattr(getattr(self._class, name), "__unittest_skip_why__", "")
        if why and not (self._stands_for == "horo" and _FOR_OTHERS.search(why)):
            return Outcome(name, "skip", why, 0.0)
        if self._is_by_name and name.startswith(_NEEDS_A_NAME):
            return Outcome(name, "skip", "It knows no backend but torch's own.", 0.0)
        if self._is_over_horo and not self._is_by_name and name.startswith(_NEEDS_GLOO):
            return Outcome(name, "skip", "It asks C++ for what gloo alone is or has.", 0.0)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            self._tests.initialize_temp_directories()
            with socket.create_server(("127.0.0.1", 0)) as free:
                os.environ["MASTER_PORT"] = str(free.getsockname()[1])
            self._tests.Barrier.init()
            files = [Path(folder, f"{rank}.out") for rank in range(self.ranks)]
            children = [self._fork(name, rank, files[rank], folder) for rank in range(self.ranks)]
            codes = _await_all(children, began + TEST_S)
            self._tests.cleanup_temp_dir()
            seconds = time.monotonic() - began
            if all(code in self._skips for code in codes):
                return Outcome(name, "skip", self._skips[codes[0]], seconds)
            if not any(codes) or "ddp_has_finalized" in name:
                return Outcome(name, "pass", "", seconds)
            texts = [file.read_text(errors="replace")[-_SHOWN:] for file in files]
            shown = "\n".join(f"--- rank {rank}: {codes[rank]}\n{text}" for rank, text in enumerate(texts))
            return Outcome(name, "fail", shown, seconds)

    def _fork(self, name: str, rank: int, out: Path, folder: str) -> int:
        child = os.fork()
        if child:
            return child
        code = 70
        try:
            target = os.open(out, os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(target, 1)
            os.dup2(target, 2)
            _, ours = multiprocessing.Pipe()
            self._class._run(rank, name, f"{folder}/store", ours)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _expect_events(tests: Any) -> None:
    """Has the tests look for the events of horo in torch's profiler, too."""
    for backends in (tests.PROFILING_SUPPORTED_BACKENDS, tests.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
        backends.append("horo")
    find_events = tests.get_profiling_event

    def find(*args: Any, **options: Any) -> Any:
        events = find_events(*args, **options)
        for event in events:
            event.is_async = True  # the tests know backends only that do each call in a thread of their own
        return events

    tests.get_profiling_event = find


def _put_in_place(stands_for: str) -> None:
    """Lets torch make groups of horo where it would make those of ``stands_for``."""
    import torch.distributed.distributed_c10d as c10d  # noqa: PLC0415

    import horo.torch.distributed as horo_distributed  # noqa: PLC0415

    if stands_for != "gloo":
        return

    class InGloosPlace(horo_distributed.HoroProcessGroup):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            options = c10d._DistributedBackendOptions()
            options.store, options.group_rank, options.group_size, options.timeout = store, rank, size, timeout
            options.group_id = "in gloo's place"
            super().__init__(options)
            self._exchange.recorded_as = "gloo"
            self.options = argparse.Namespace()

    c10d.ProcessGroupGloo = InGloosPlace  # type: ignore[misc]


def _await_all(children: Sequence[int], deadline: float) -> list[int]:
    """The exit codes; a process that is late is killed, and so are the others of one that has failed, soon."""
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    codes[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for child in set(children) - set(codes):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[child] for child in children]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--as", dest="stands_for", choices=("horo", "gloo", "mpi"), default="horo")
    parser.add_argument("--over", choices=("horo", "gloo"), default="horo")
    parser.add_argument("-k", dest="part", default="", help="tests with this in their names")
    parser.add_argument("--list", type=Path, help="tests that a file names, one a line")
    given = parser.parse_args(words)
    suite = Suite(given.ranks, given.stands_for, given.over)
    names = given.list.read_text().split() if given.list else suite.names(given.part)
    outcomes = []
    for name in names:
        outcomes.append(outcome := suite.run(name))
        print(f"{outcome.kind} {name} {outcome.seconds:.1f} s {outcome.why}", flush=True)
    counts = Counter(outcome.kind for outcome in outcomes)
    totals = ", ".join(f"{counts[kind]} {kind}" for kind in ("pass", "skip", "fail"))
    print(f"{given.ranks} ranks as {given.stands_for}: {totals}")
    return 1 if counts["fail"] else 0


if __name__ == "__main__":
    sys.exit(main())
