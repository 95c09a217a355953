"""The benchmark between hosts runs, checks its sums, leaves nothing behind, and computes shares by its formulas."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from example_runs import LIMIT_SECONDS, ROOT, start
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
def test_an_interrupt_while_a_namespace_is_made_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    do = spaces._do

    def interrupted(*words: str) -> str:
        said = do(*words)
        if words[:3] == ("ip", "netns", "add") and words[3].endswith("space2"):
            raise KeyboardInterrupt
        return said

    monkeypatch.setattr(spaces, "_do", interrupted)
    with pytest.raises(KeyboardInterrupt), spaces.Spaces(2):
        pass
    assert namespaces_left(os.getpid()) == []


@needs_spaces
def test_a_job_that_fails_is_a_sentence_with_what_it_said() -> None:
    layout = two_hosts.Layout(2, 1, "1gbit", 4096)
    with pytest.raises(ContestError, match=r"(?s)4 KiB, 2 hosts of 1 rank, 1gbit: the job ended with code .*'nobody'"):
        two_hosts.measure([layout], ["nobody"], rounds=1)


def test_a_job_that_does_not_end_in_time_is_a_sentence_with_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"], b"on stdout\n", b"on stderr\n")

    monkeypatch.setattr(two_hosts.subprocess, "run", run)
    hosts = SimpleNamespace(slots=lambda ranks: "", remote_shell="", enter=lambda index: [])
    said = r"4 KiB, 2 hosts of 1 rank, 1gbit: the job has not ended within 120 s\n    on stdout\n    on stderr$"
    with pytest.raises(ContestError, match=said):
        two_hosts.run_job(hosts, two_hosts.Layout(2, 1, "1gbit", 4096), ["tcp"], rounds=1)


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


def test_a_wrong_sum_shows_in_the_table() -> None:
    layout = two_hosts.Layout(2, 2, "1gbit", 4)
    lines = two_hosts.as_lines([two_hosts.Result.of(layout, "gloo", [1.0], right=False)])
    assert "4 B, 2 hosts of 2 ranks, 1gbit" in lines[0]
    assert lines[2].endswith("WRONG")


def test_rows_say_what_is_reached_and_what_is_short() -> None:
    layout = two_hosts.Layout(2, 1, "1gbit", 64 << 20)
    seconds = {"tcp": 0.56, "gloo": 0.7, "horo": 0.57, "horo bf16": 0.40}
    found = {name: two_hosts.Result.of(layout, name, [value], right=True) for name, value in seconds.items()}
    share, faster = two_hosts.rows_for(layout, found)
    assert share.ok and share.ratio == pytest.approx(0.7 / 0.57)
    assert share.figure == pytest.approx(100 * (64 << 20) / 0.57 / 125e6 * 1514 / 1448)
    assert not faster.ok and faster.figure == pytest.approx(0.57 / 0.40)


@pytest.mark.parametrize(("text", "rate"), [("1gbit", 125e6), ("2.5gbit", 312.5e6), ("100mbit", 12.5e6)])
def test_rates_are_read(text: str, rate: float) -> None:
    assert spaces.rate_of(text) == rate


@pytest.mark.parametrize("text", ["", "gbit", "1", "0gbit", "1gbps", "-1gbit"])
def test_bad_rate_is_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a rate"):
        spaces.rate_of(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "1"], "--hosts 1: there is no link with less than 2"),
        (["--hosts", "2,x"], "'2,x' is no list of numbers from 1 to 8"),
        (["--rates", "fast"], "'fast' is not a rate"),
        (["--rounds", "0"], "--rounds 0: at least 1"),
        (["--size", "6"], "--size 6: float32 takes 4 bytes each"),
    ],
)
def test_bad_option_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        two_hosts.parse_arguments(words)
    assert message in capsys.readouterr().err
