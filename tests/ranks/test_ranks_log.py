"""What HORO_LOG_LEVEL shows of a job in which nothing happens: a line at its start, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import IMPORT_TORCH_SILENTLY

from horo import __version__

HEAD = "import os\nos.environ.update({extra!r}.get(os.environ.get('HOROVOD_RANK'), {{}}))\n"
WITH_TORCH = IMPORT_TORCH_SILENTLY + "import horo.torch as hvd\nhvd.init()\nhvd.barrier()\nhvd.shutdown()\n"
WITHOUT_TORCH = """
from horo.bootstrap.job import start
from horo.core.context import OPS, RequestBuffer
job = start(threads=1)
job.context.finish(job.context.submit(RequestBuffer.of(OPS["barrier"], "barrier")))
job.close()
"""
"""What says the lines is the same, and there much sooner."""
START = (
    rf"horo \[0\] info: horo {re.escape(__version__)} \(core {re.escape(__version__)}\+abi\d+, \w+\): "
    r"{size}, started by {launcher}; {data}"
)


def lines_of(
    folder: Path, level: str, size: int, extra: dict[str, dict[str, str]] | None = None, train: str = WITHOUT_TORCH
) -> list[str]:
    script = folder / "train.py"
    script.write_text(HEAD.format(extra=extra or {}) + train)
    place = ["-m", "horo.runner", "-np", str(size), "--oversubscribe", "--no-prefix", sys.executable] if size else []
    done = subprocess.run(
        [sys.executable, *place, str(script)],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "HORO_LOG_LEVEL": level},
    )
    assert done.stdout == ""
    return sorted(done.stderr.splitlines())


@pytest.mark.parametrize("level", ["warning", "off"])
def test_a_job_in_order_says_nothing(tmp_path: Path, level: str) -> None:
    assert lines_of(tmp_path, level, 2) == []


def test_at_info_rank_0_says_what_has_started(tmp_path: Path) -> None:
    (line,) = lines_of(tmp_path, "info", 2, train=WITH_TORCH)
    data = "data in shared memory, gradients (in host memory after|during) backward"
    assert re.fullmatch(START.format(size=r"2 ranks on 1 host \(localhost: 2\)", launcher="hororun", data=data), line)
    (line,) = lines_of(tmp_path, "info", 0)
    assert re.fullmatch(START.format(size="1 rank", launcher="nobody", data="no data travels"), line)


def test_at_info_hosts_and_the_transport_between_them_are_named(tmp_path: Path) -> None:
    other = {"1": {"HORO_HOST_ID": "other", "HORO_HOSTNAME": "h2"}}
    (line,) = lines_of(tmp_path, "info", 3, other)
    data = "data in shared memory on a host, by TCP between hosts, gradients during backward"
    size = r"3 ranks on 2 hosts \(localhost: 2, h2: 1\)"
    assert re.fullmatch(START.format(size=size, launcher="hororun", data=data), line)


@pytest.mark.parametrize(("overlap", "when"), [("always", "during"), ("never", "after")])
def test_at_info_the_time_of_gradients_is_said(tmp_path: Path, overlap: str, when: str) -> None:
    (line,) = lines_of(tmp_path, "info", 2, {rank: {"HORO_OVERLAP": overlap} for rank in "01"})
    assert line.endswith(f"; data in shared memory, gradients {when} backward")


def test_at_debug_every_rank_says_where_it_is(tmp_path: Path) -> None:
    first, start, second = lines_of(tmp_path, "debug", 2)
    assert start.startswith("horo [0] info: horo ")
    for rank, line in enumerate((first, second)):
        pattern = (
            rf"horo \[{rank}\] debug: rank {rank} of 2 on localhost, process \d+: local rank {rank} of 2, "
            r"cross rank 0 of 1, \d+ cores? of this host, segments of 256 KiB, joined in \d+ ms"
        )
        assert re.fullmatch(pattern, line), line
