"""The benchmark between hosts runs, checks its sums, leaves nothing behind, and computes shares by its formulas."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from example_runs import LIMIT_SECONDS, ROOT, start, whole
from jobs import wait_until

FOLDER = ROOT / "benchmarks"
SCRIPT = str(FOLDER / "two_hosts.py")

sys.path.insert(0, str(FOLDER))
import spaces  # noqa: E402  (benchmarks/spaces.py)
import two_hosts  # noqa: E402  (benchmarks/two_hosts.py)
from contest import ContestError  # noqa: E402  (benchmarks/contest.py)

needs_spaces = pytest.mark.skipif(bool(spaces.why_not()), reason=spaces.why_not())


def namespaces_left(pid: int) -> list[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line.startswith(f"horo-bench-{pid}-")]


@needs_spaces
@whole
def test_measures_two_layouts_and_writes_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["--hosts", "2", "--per-host", "1,2", "--rates", "1gbit", "--size", "64K", "--rounds", "2"]
    done = start([sys.executable, SCRIPT, *words, "--json", str(file)])
    document = json.loads(file.read_text())

    assert [(row["per_host"], row["contestant"]) for row in document["rows"]] == [
        (per_host, contestant) for per_host in (1, 2) for contestant in two_hosts.CONTESTANTS
    ]
    for row in document["rows"]:
        assert row["right"]
        assert len(row["seconds"]) == 2
        assert 0 < row["data_share"] < row["frame_share"]
    assert set(document) >= {"machine", "versions", "commit", "knobs", "options", "time", "tcp"}
    assert done.stdout.count(" ok\n") == 8


@needs_spaces
def test_an_interrupt_leaves_no_namespace_and_no_process() -> None:
    words = ["--hosts", "2", "--per-host", "1", "--rates", "1mbit", "--size", "64M"]
    process = subprocess.Popen([sys.executable, SCRIPT, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: len(namespaces_left(process.pid)) == 3, "the namespaces are there")
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_SECONDS) == 130
    finally:
        process.kill()
        process.communicate()
    assert namespaces_left(process.pid) == []


@needs_spaces
@whole
def test_a_job_that_fails_is_a_sentence_with_what_it_said() -> None:
    layout = two_hosts.Layout(2, 1, "1gbit", 4096)
    with pytest.raises(ContestError, match=r"(?s)4 KiB, 2 hosts of 1 rank, 1gbit: the job ended with code .*'nobody'"):
        two_hosts.measure([layout], ["nobody"], rounds=1)


def test_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(spaces.os, "geteuid", lambda: 1000)
    assert two_hosts.run(two_hosts.parse_arguments([])) == 0
    assert capsys.readouterr().out == "two_hosts.py: skipped: making network namespaces needs root\n"
    assert two_hosts.check_rows() == []


def test_shares_follow_the_formulas() -> None:
    layout = two_hosts.Layout(4, 1, "1gbit", 100_000_000)
    assert layout.bytes_to_send == pytest.approx(150e6)  # 2 * 3 / 4 of the tensor
    result = two_hosts.Result.of(layout, "horo", [9.0, 1.5, 1.0], right=True)
    assert result.median_s == 1.5
    assert result.data_share == pytest.approx(0.8)  # 100 MB/s of 125
    assert result.frame_share == pytest.approx(0.8 * 1514 / 1448)


def test_rows_say_what_is_reached_and_what_is_short() -> None:
    layout = two_hosts.Layout(2, 1, "1gbit", 64 << 20)
    seconds = {"tcp": 0.56, "gloo": 0.7, "horo": 0.57, "horo bf16": 0.40}
    found = {name: two_hosts.Result.of(layout, name, [value], right=True) for name, value in seconds.items()}
    share, faster = two_hosts.rows_for(layout, found)
    assert share.ok and share.ratio == pytest.approx(0.7 / 0.57)
    assert share.figure == pytest.approx(100 * (64 << 20) / 0.57 / 125e6 * 1514 / 1448)
    assert not faster.ok and faster.figure == pytest.approx(0.57 / 0.40)
