"""One rank of startup.py: when its parts of the start are over, by the clock that all processes share."""

from __future__ import annotations

import time

STARTED_S = time.monotonic()

import json  # noqa: E402  (what comes before is part of the start)
import sys  # noqa: E402


def say(**values: object) -> None:
    """One line for the driver, in one write, so that lines of several ranks do not mix."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def start_horo() -> None:
    """As a training script does it."""
    import torch  # noqa: F401, PLC0415  (its time is measured)

    import horo.torch as hvd  # noqa: PLC0415

    imported_s = time.monotonic()
    hvd.init()
    say(started_s=STARTED_S, imported_s=imported_s, ready_s=time.monotonic())
    hvd.shutdown()


def start_gloo() -> None:
    import torch  # noqa: F401, PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    imported_s = time.monotonic()
    dist.init_process_group("gloo")
    say(started_s=STARTED_S, imported_s=imported_s, ready_s=time.monotonic())
    dist.destroy_process_group()


def import_horo() -> None:
    """What ``import horo.torch`` takes where torch is there already."""
    import torch  # noqa: F401, PLC0415

    begin_s = time.monotonic()
    import horo.torch  # noqa: F401, PLC0415

    say(import_ms=(time.monotonic() - begin_s) * 1e3)


def cycle(count: int) -> None:
    """``init()`` and ``shutdown()``, again and again."""
    import torch  # noqa: F401, PLC0415

    import horo.torch as hvd  # noqa: PLC0415

    cycles_ms = []
    for _ in range(count):
        begin_s = time.monotonic()
        hvd.init()
        hvd.shutdown()
        cycles_ms.append((time.monotonic() - begin_s) * 1e3)
    say(cycles_ms=cycles_ms)


def main() -> int:
    what, *more = sys.argv[1:]
    if what == "cycle":
        cycle(int(more[0]))
    else:
        {"horo": start_horo, "gloo": start_gloo, "import": import_horo}[what]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
